import numpy as np

from gspmd_lm.data import packing
from gspmd_lm.data.packing import InMemory

END = 99


def _stream(*documents):
    return np.concatenate([[*document, END] for document in documents]).astype(np.uint16)


def test_documents_by_hand():
    rows = packing.documents(InMemory(_stream([1, 2, 3], [4], [5, 6, 7, 8, 9])), 4, END)
    assert len(rows) == 3
    read = rows.read([0, 1, 2, -1])
    assert {array.dtype for array in read.values()} == {np.dtype(np.int32)}
    #                                       3 documents: 1 2 3 END | 4 END | 5 6 7 8 9 END
    assert read["tokens"].tolist() == [[1, 2, 3, END], [4, END, 5, 6], [7, 8, 9, 0], [0, 0, 0, 0]]
    assert read["targets"].tolist() == [[2, 3, END, -1], [END, -1, 6, 7], [8, 9, END, -1], [-1, -1, -1, -1]]
    assert read["segment_ids"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert read["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 0], [0, 0, 0, 0]]


def test_a_document_that_begins_with_the_token_that_ends_it_is_one_segment():
    rows = packing.documents(InMemory(_stream([END, 1, 2], [END, 3])), 6, END, begins_with_end=True)
    read = {name: array[0].tolist() for name, array in rows.read([0]).items()}
    assert read["tokens"] == [END, 1, 2, END, END, 3] and read["targets"] == [1, 2, END, -1, 3, END]
    assert read["segment_ids"] == [1, 1, 1, 1, 2, 2] and read["positions"] == [0, 1, 2, 3, 0, 1]


def test_text_by_hand():
    rows = packing.text(InMemory(np.arange(10, dtype=np.uint16)), 4)
    assert (
        len(rows) == 2
        and len(packing.text(InMemory(np.arange(9)), 4)) == 2
        and len(packing.text(InMemory(np.arange(8)), 4)) == 1
    )
    read = rows.read([1, 0])
    assert read["tokens"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert read["targets"].tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert (read["segment_ids"] == 1).all() and read["positions"].tolist() == [[0, 1, 2, 3]] * 2


def test_every_token_but_the_first_of_a_document_is_a_target_once():
    draw = np.random.default_rng(0)
    for seq in (1, 2, 7, 32):
        documents = [draw.integers(0, END, draw.integers(1, 40)).tolist() for _ in range(30)]
        rows = packing.documents(InMemory(_stream(*documents)), seq, END)
        read = rows.read(range(len(rows)))
        wanted = [token for document in documents for token in [*document[1:], END]]
        assert read["targets"][read["targets"] >= 0].tolist() == wanted
        given = read["tokens"][read["targets"] >= 0].tolist()
        assert given == [token for document in documents for token in document]


def test_a_segment_never_holds_two_documents_and_positions_count_it():
    draw = np.random.default_rng(1)
    documents = [[number] * int(draw.integers(1, 30)) for number in range(40)]
    rows = packing.documents(InMemory(_stream(*documents)), 16, END)
    read = rows.read(range(len(rows)))
    for tokens, segments, positions in zip(read["tokens"], read["segment_ids"], read["positions"], strict=True):
        for segment in set(segments.tolist()) - {0}:
            inside = segments == segment
            assert len(set(tokens[inside].tolist()) - {END}) <= 1
            assert positions[inside].tolist() == list(range(inside.sum()))
    padded = (read["segment_ids"] == 0).any(axis=1)
    assert not padded[:-1].any()


def _conversation(*tokens):
    """Tokens of a conversation; those below 0 are the assistant's."""
    marked = np.asarray([abs(token) for token in tokens], np.uint32)
    marked[np.asarray(tokens) < 0] |= packing.TARGET
    marked[-1] |= packing.LAST
    return marked


def test_conversations_by_hand():
    parts = [
        _conversation(1, 2, -3, -4),
        _conversation(5, -6),
        _conversation(7, -8, 9),
        _conversation(*range(1, 9), -9),
    ]
    rows, cut = packing.conversations(InMemory(np.concatenate(parts)), 6)
    assert (len(rows), cut) == (4, 1)
    read = rows.read([0, 1, 2, 3, -1])
    assert {array.dtype for array in read.values()} == {np.dtype(np.int32)}
    assert read["tokens"].tolist() == [
        [1, 2, 3, 4, 5, 6],
        [7, 8, 9, 0, 0, 0],
        [1, 2, 3, 4, 5, 6],
        [7, 8, 0, 0, 0, 0],
        [0] * 6,
    ]
    assert read["targets"].tolist() == [
        [-1, 3, 4, -1, 6, -1],
        [8, -1, -1, -1, -1, -1],
        [-1] * 6,
        [-1, 9, -1, -1, -1, -1],
        [-1] * 6,
    ]
    assert read["segment_ids"].tolist() == [
        [1, 1, 1, 1, 2, 2],
        [1, 1, 1, 0, 0, 0],
        [1] * 6,
        [1, 1, 0, 0, 0, 0],
        [0] * 6,
    ]
    assert read["positions"].tolist() == [
        [0, 1, 2, 3, 0, 1],
        [0, 1, 2, 0, 0, 0],
        [0, 1, 2, 3, 4, 5],
        [0, 1, 0, 0, 0, 0],
        [0] * 6,
    ]


def test_every_answer_is_a_target_once_and_only_long_conversations_are_cut():
    draw = np.random.default_rng(2)
    for seq in (1, 3, 8, 40):
        sizes = draw.integers(2, 30, 60)
        signs = [np.concatenate([[1], draw.choice([-1, 1], size - 1)]) for size in sizes]
        parts = [_conversation(*(signs[i] * (i + 1))) for i in range(60)]
        rows, cut = packing.conversations(InMemory(np.concatenate(parts)), seq)
        assert cut == (sizes > seq + 1).sum()
        read = rows.read(range(len(rows)))
        targets = read["targets"][read["targets"] >= 0]
        assert targets.tolist() == [i + 1 for i in range(60) for sign in signs[i] if sign < 0]
        assert (targets == read["tokens"][read["targets"] >= 0]).all(), "a target of another conversation"
        for tokens, segments, positions in zip(read["tokens"], read["segment_ids"], read["positions"], strict=True):
            for segment in set(segments.tolist()) - {0}:
                inside = segments == segment
                (number,) = set(tokens[inside].tolist())
                assert positions[inside].tolist() == list(range(inside.sum()))
                if sizes[number - 1] <= seq + 1:
                    assert inside.sum() >= sizes[number - 1] - 1  # the last token may be a target alone


def test_too_little_for_a_row():
    assert len(packing.documents(InMemory(np.empty(0, np.uint16)), 4, END)) == 0
    assert len(packing.conversations(InMemory(np.empty(0, np.uint32)), 4)[0]) == 0
    assert len(packing.text(InMemory(np.arange(4)), 4)) == 0 and len(packing.text(InMemory(np.arange(5)), 4)) == 1


def test_random_rows_do_not_overlap_and_cover_the_vocabulary():
    rows = packing.random(50, 8, 10, (3, 0))
    read = rows.read(range(50))
    assert len(rows) == 50 and (read["targets"][:, :-1] == read["tokens"][:, 1:]).all()
    both = np.concatenate([read["tokens"], read["targets"][:, -1:]], axis=1)
    assert (both.reshape(-1) == rows.stream.tokens).all() and set(both.reshape(-1).tolist()) == set(range(10))
    assert (packing.random(50, 8, 10, (3, 0)).stream.tokens == rows.stream.tokens).all()
    assert (packing.random(50, 8, 10, (3, 1)).stream.tokens != rows.stream.tokens).any()
