"""What is sent or copied hides behind compute as far as measurements say."""

import pytest

from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.plan import overlap
from gspmd_lm.plan.operations import Offloaded
from gspmd_lm.plan.overlap import Overlap
from gspmd_lm.plan.transfers import EstimatedTransfer
from gspmd_lm.sharding import rules_file


def test_between_slices_weights_are_waited_for_and_so_are_gradients_of_what_is_gathered():
    """However long loops compute. Replicated weights alone have gradients that hide."""
    between = Overlap(targets.parse("2@v6e:2x2"))
    rules = rules_file.from_dict({"mesh": {"data": 8}, "rules": {"batch": "data"}, "dcn": {"data": 2}}, "two").fill(8)

    def share(*moves):
        exposed, sent_s = between.exposed_seconds(rules, moves, (1e6, 1e6), 0)
        return exposed["data"] / sent_s

    gradients, weights = (
        EstimatedTransfer("gradients", "data", 1e8, 16, True, "all-reduce"),
        EstimatedTransfer("weights", "data", 1e8, 16, True, "all-gather"),
    )
    assert share(gradients) == pytest.approx(overlap.LEAST_EXPOSED["tpu"][2])
    assert share(weights) == pytest.approx(overlap.SLICES_EXPOSED)
    once = weights._replace(bytes=1.0, times_per_step=1, in_loop=False)
    assert share(gradients, once) == pytest.approx(1.0)


def test_weights_are_gathered_in_each_pass_of_a_loop_and_outside_of_loops_once():
    weights = EstimatedTransfer("weights", "fsdp", 8.0, 3, True, "all-gather")
    assert [*overlap._combine([weights, weights])] == [("weights", "fsdp", 6, True, 8.0)]
    assert [*overlap._combine([weights._replace(in_loop=False)])] == [("weights", "fsdp", 3, False, 8.0)]


@pytest.mark.parametrize(("passes_s", "hidden"), [((1e6, 0.0), 0), ((0.0, 1e6), 1)], ids=["forward", "backward"])
def test_weights_hide_behind_the_pass_that_they_are_gathered_for(passes_s, hidden):
    host = Overlap(targets.parse("h100:8"))
    rules = rules_file.load("fsdp8").fill(8)
    exposed, sent_s = host.exposed_seconds(
        rules, [EstimatedTransfer("weights", "fsdp", 1e8, 16, True, "all-gather")], passes_s, 0
    )
    assert exposed["fsdp"] / sent_s == pytest.approx((1 + overlap.LEAST_EXPOSED["gpu"][hidden]) / 2)


@pytest.mark.parametrize(
    ("sizes", "begins_with_input", "computes_again", "exposed"),
    [
        ([1, 2, 4, 8, 16, 32], True, True, 8 + 16 + 32 + 32),
        ([2, 4, 8], False, False, 8 + 8),
        ([1, 2], True, True, 2),
        ([1, 2], True, False, 0),
    ],
)
def test_on_gpus_compute_waits_for_copies_of_what_is_made_last(sizes, begins_with_input, computes_again, exposed):
    """No more than two copies are under way. Sizes are in GB."""
    loop = Offloaded((), (), begins_with_input)

    def exposed_s(target, pass_s):
        host = Overlap(targets.parse(target))
        sizes_bytes = [size * 1e9 for size in sizes]
        remaining_s = [[pass_s] * len(sizes)]
        return host.exposed_host_copy_s([loop], [sizes_bytes], remaining_s, (pass_s, pass_s), computes_again)

    link_bytes_per_s = CHIPS["h100"].host_link_bytes_per_s
    assert exposed_s("h100:8", 1e6) == pytest.approx(exposed * 1e9 / link_bytes_per_s)
    assert exposed_s("h100:8", 0.0) == pytest.approx(2 * sum(sizes) * 1e9 / link_bytes_per_s)
    assert exposed_s("v5p:2x2x2", 1e6) == 0


def test_on_gpus_a_copy_to_the_host_hides_behind_what_its_iteration_has_left_to_compute():
    """An array that is made last has little of it, however long the iteration took before."""
    host, loop = Overlap(targets.parse("h100:8")), Offloaded((), (), False)
    link_bytes_per_s = CHIPS["h100"].host_link_bytes_per_s

    def exposed_s(first_s, second_s):
        sizes = [[link_bytes_per_s, 2 * link_bytes_per_s]]  # one second, and two
        return host.exposed_host_copy_s([loop], sizes, [[first_s, second_s]], (1e6, 1e6), False)

    share, _ = overlap.HOST_HIDDEN_SHARE["gpu"]
    assert exposed_s(1e6, 1.0) == pytest.approx(2 - share)
    assert exposed_s(1.0, 1.0) == pytest.approx(3 - share)
    assert exposed_s(1e6, 1e6) == 0
