"""Which rows of the rules file cause a collective: reasoned from the arrays that it stands between."""

from collections.abc import Iterable, Mapping, Sequence

from gspmd_lm.foresight.collectives.provenance import Name
from gspmd_lm.rules import TABLES, Rules

# The end of a weight's name, or of a module's, -> the activations that its operations read and write.
_AROUND = {
    "wq": ("block_input", "q"), "bq": ("q",), "q_norm": ("q",),
    "wk": ("block_input", "k"), "bk": ("k",), "k_norm": ("k",),
    "wv": ("block_input", "v"), "bv": ("v",),
    "wo": ("attention_out", "residual"), "bo": ("residual",),
    "attention": ("q", "k", "v", "attention_out"),
    "w_gate": ("block_input", "hidden"), "w_up": ("block_input", "hidden"), "b_gate": ("hidden",), "b_up": ("hidden",),
    "w_down": ("hidden", "residual"), "b_down": ("residual",),
    "mlp": ("hidden",),
    "attention_norm": ("residual",), "mlp_norm": ("residual",), "final_norm": ("residual",),
    "embedding": ("tokens", "residual"), "position_embedding": ("tokens", "residual"),
    "unembedding": ("block_input", "logits"), "loss": ("block_input", "tokens", "logits"),
}  # fmt: skip
# What an activation is made from, where that may be split in another way.
_MADE_FROM = {"block_input": ("residual",), "attention_out": ("q", "k", "v"), "k": ("k", "q"), "v": ("v", "q")}


class Causes:
    """The rows of `rules` behind a movement. `arrays` are the model's: path of a weight or name of an activation, and
    its logical axes."""

    def __init__(self, rules: Rules, arrays: Mapping[str, Sequence[str]]):
        self.rules = rules
        self.arrays = arrays
        self.activation_names = rules.vocabulary.activations
        self.weights = [path for path in arrays if path not in self.activation_names]

    def splitting(self, table: str, array: str, over: Iterable[str]) -> set[str]:
        """Keys of the rows by which `table` splits an array over some of the mesh axes `over`."""
        over, found = set(over), set()
        for axis in self.arrays.get(array, ()):
            row = self.rules.row(table, array, axis)
            if row and over & set(self.rules.split(table, array, axis)):
                found.add(row.key)
        return found

    def reduction(self, name: Name, over: Sequence[str], scattered: bool) -> set[str]:
        """Of a sum over devices: the rows that split what is summed over, and where a piece of the sum is kept by each
        device also those that split the result."""
        found = set()
        for path in name.sums:
            array, _, axis = path.rpartition(".")
            row = self.rules.row("rules", array, axis)
            if row and set(over) & set(self.rules.split("rules", array, axis)):
                found.add(row.key)
        if name.sums and not name.placed:  # of sums that were added up, one may be named
            for path in name.of:
                found |= self.splitting("rules", path, over)
        if not name.sums:
            found = self.statistics(over) if name.phase == "optimizer" else self.activations(name, over)
        if scattered and name.placed:
            found |= self.splitting(*name.placed, over)
        elif scattered:
            for path in name.of:
                found |= self.splitting("optimizer", path, over)
        return found

    def gather(self, name: Name, over: Sequence[str], weight: str, new: bool) -> set[str]:
        """Of an array put together, a weight or an activation: the rows that split it before; of a new weight, those of
        the optimizer."""
        if new:
            return self.splitting("optimizer", weight, over) - self.splitting("weights", weight, over)
        if weight:
            return self.splitting("weights", weight, over)
        return self.activations(name, over)

    def activations(self, name: Name, over: Sequence[str]) -> set[str]:
        """Rows that split over `over` what is placed there, what it is made from, or else what stands around."""
        ends = [path.rsplit(".", 1)[-1] for path in name.of] + list(reversed(name.modules))
        around = [array for end in ends for array in _AROUND.get(end, ())]
        placed = [name.placed[1]] if name.placed and name.placed[1] in self.activation_names else []
        before = [array for one in placed for array in _MADE_FROM.get(one, ())]
        for arrays in (before, placed, around, self.activation_names):
            if found := {key for array in arrays for key in self.splitting("rules", array, over)}:
                return found
        return self.mapping(over)

    def resharding(self, name: Name, over: Sequence[str], weight: str) -> set[str]:
        """Of a move from one split to another: both."""
        found = self.activations(name, over) if name.phase != "optimizer" else set()
        weights = {weight} if weight else {path for path in name.of if path in self.arrays}
        for path in weights:
            found |= self.splitting("optimizer" if name.phase == "backward" else "weights", path, over)
        return found or self.mapping(over)

    def look_up(self, name: Name) -> set[str]:
        """Of what belongs to a look-up in a table: the rows that split the table's own rows, which decide its form."""
        return {
            row.key
            for path in name.of
            if path.endswith("embedding") and self.rules.split("rules", path, self.arrays[path][0])
            and (row := self.rules.row("rules", path, self.arrays[path][0]))
        }  # fmt: skip

    def looks_up(self, name: Name) -> bool:
        """Whether it belongs to a look-up in a table, or its gradient, and is not said to be more."""
        return not (name.placed or name.sums) and any(path.endswith("embedding") for path in name.of)

    def statistics(self, over: Sequence[str]) -> set[str]:
        """Of a sum over all weights, such as the gradient's norm: what splits those that `over` splits."""
        found = set()
        for path in self.weights:
            split = {name for axis in self.arrays[path] for name in self.rules.split("optimizer", path, axis)}
            if set(over) <= split:
                found |= self.splitting("optimizer", path, over)
        return found or self.mapping(over)

    def mapping(self, over: Sequence[str]) -> set[str]:
        """Every row that maps to one of the mesh axes."""
        return {row.key for row in self.rules.rows if set(over) & set(row.mesh_axes)}

    def ordered(self, keys: Iterable[str]) -> tuple[str, ...]:
        """As they stand in the file."""
        keys = set(keys)
        return tuple(row.key for table in TABLES for row in self.rules.rows if row.table == table and row.key in keys)
