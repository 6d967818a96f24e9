"""The size of the buffers in which rows arrive at their experts, relative to the rows of a device."""

from gspmd_lm.config import ModelConfig
from gspmd_lm.foresight.graph import GROUPED, DataflowGraph, Node, breadth_first
from gspmd_lm.model.moe_routing import buffer_rows, capacity
from gspmd_lm.sharding.rules import Rules


def in_buffers(graph: DataflowGraph) -> dict[Node, Node]:
    """Arrays of rows that were sent to their experts -> the nearest matmul of such rows.

    These arrays stand between two gathers: one sorts rows, and one brings them back into the order of tokens.
    """
    found: dict[Node, Node] = {}
    for matmul in graph.matmuls:
        rows = matmul.node.shape[0] if matmul.group_axis else 0

        def holds_rows(node: Node, rows: int = rows) -> bool:
            return node.is_float and len(node.shape) == 2 and node.shape[0] == rows and node.primitive != "gather"

        def near(node: Node) -> list[Node]:
            return [*filter(holds_rows, (*node.inputs, *node.users))]

        if rows:
            for node in (matmul.node, *breadth_first([matmul.node], near, holds_rows)):
                found.setdefault(node, matmul.node)
    return found


def buffer_share(rules: Rules, model: ModelConfig, nodes: tuple[Node, ...]) -> float:
    """The bytes of a buffer over those of a device's rows; 1 where rows stay, and for arrays in no buffer.

    nodes: those that tell how an array is sharded. For an array in a buffer, a matmul of experts is among them.
    """
    grouped = next((node for node in nodes if node.primitive == GROUPED), None)
    tokens = next((node.placed for node in nodes if node.placed and {"batch", "seq"} <= {*node.placed.axes}), None)
    if grouped is None or tokens is None:
        return 1.0
    splits = [rules.split("rules", tokens.array, axis) for axis in ("batch", "seq")]
    token_axes = {name for names in splits for name in names}
    over = rules.split("rules", "layers.mlp.w_down", "expert")
    shards, experts, k = rules.num_shards(over), grouped.inputs[1].shape[0], model.moe.per_token
    if shards == 1 or not {*over} <= token_axes:
        return 1.0
    whole = next(node.shape[:2] for node in nodes if node.placed == tokens)
    B, T = (size // rules.num_shards(names) for size, names in zip(whole, splits, strict=True))
    buffer = buffer_rows(B, T, k, experts // shards, shards, capacity(model, T), rules.expert_buffer)
    return buffer * rules.num_shards(token_axes) / grouped.shape[0]
