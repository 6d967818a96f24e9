"""Which rows of the rules file cause a collective: reasoned from the arrays that it stands between."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.sharding.op_names import OpName
from gspmd_lm.sharding.rules import TABLES, Rules


class Attribution:
    """The rows of `rules` behind a movement.

    `arrays` are the model's: path of a weight or name of an activation, and its logical axes. `traced` knows which
    activations an operation stands between.
    """

    def __init__(self, rules: Rules, arrays: Mapping[str, Sequence[str]], graph: DataflowGraph):
        self.rules = rules
        self.arrays = arrays
        self.graph = graph
        self.weights = [path for path in arrays if path in graph.weights]

    def is_activation(self, array: str) -> bool:
        """Whether an array of the model is an activation."""
        return array in self.arrays and array not in self.graph.weights

    def rows_splitting(
        self, table: str, arrays: Iterable[str], over: Collection[str], axes: Iterable[str] | None = None
    ) -> set[str]:
        """Keys of the rows by which `table` splits arrays, or some axes of them, over some of the mesh axes `over`."""
        axes_of_arrays = [
            (array, axis) for array in arrays for axis in (self.arrays.get(array, ()) if axes is None else axes)
        ]
        rows = [self.rules.row(table, *one) for one in axes_of_arrays if set(over) & set(self.rules.split(table, *one))]
        return {row.key for row in rows if row}

    def reduction(self, name: OpName, over: Sequence[str], scattered: bool) -> set[str]:
        """Rows behind a sum over devices: those that split what is summed over.

        Where each device keeps a piece of the sum, they are also those that split the result.
        """
        if name.summed_axes:
            rows = self.summed(name, over)
        else:
            rows = self.statistics(over) if name.phase == "optimizer" else self.activations(name, over)
            rows |= self.batch_rows_of_gradient(name, over)
        if scattered and name.array:
            rows |= self.rows_splitting(name.table, [name.array], over)
        elif scattered:
            rows |= self.rows_splitting("optimizer", name.owners, over)
        return rows

    def summed(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that split the axes which a name says are summed over."""
        # Of sums that were added up, the name may say one. It then places nothing.
        rows = set() if name.array else self.rows_splitting("rules", name.owners, over)
        for path in name.summed_axes:
            array, _, axis = path.rpartition(".")
            rows |= self.rows_splitting("rules", [array], over, [axis])
        return rows

    def batch_rows_of_gradient(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that cut the matmul whose result is a weight's gradient.

        Where `over` splits the gradients that the matmul reads, though not the activation that they are of, the
        compiler could gather them instead. It sums because the matmul is cut along the rows of the batch.
        """
        weight = name.array if name.phase == "backward" else ""
        rows = set()
        for matmul in self.graph.matmuls:
            x, y = matmul.input.placed, matmul.output and matmul.output.placed
            if matmul.path == weight and x and y and not self.rows_splitting("rules", [y.array], over):
                rows |= self.rows_splitting("rules", [x.array], self.rules.mesh, x.axes[:1])
        return rows

    def gather(self, name: OpName, over: Sequence[str], weight: str, new: bool) -> set[str]:
        """Rows that split a weight or an activation before it was put together; of a new weight, those of the
        optimizer."""
        if new:
            return self.rows_splitting("optimizer", [weight], over) - self.rows_splitting("weights", [weight], over)
        return self.rows_splitting("weights", [weight], over) if weight else self.activations(name, over)

    def complete(self, rows: set[str], name: OpName, over: Sequence[str]) -> set[str]:
        """`rows`, and for mesh axes that none of these rows maps to the rows of activations around it."""
        mapped = {mesh_axis for row in self.rules.rows if row.key in rows for mesh_axis in row.mesh_axes}
        return rows | self.activations(name, [mesh_axis for mesh_axis in over if mesh_axis not in mapped])

    def activations(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that split activations over `over`: for each mesh axis, those of the nearest that it splits.

        What no trace knows a place of is on its way to groups, as tokens to their experts: those are split too.
        """
        rows = {key for mesh_axis in over for key in self._nearest(name, mesh_axis)}
        for matmul in self.graph.matmuls if name.array and name.array not in self.arrays else ():
            rows |= self.rows_splitting("rules", [matmul.path], over, [matmul.group_axis] if matmul.group_axis else [])
        return rows

    def _nearest(self, name: OpName, mesh_axis: str) -> set[str]:
        for arrays in self._outward(name):
            if rows := self.rows_splitting("rules", arrays, [mesh_axis]):
                return rows
        return self.rows_mapped_to([mesh_axis])

    def _outward(self, name: OpName) -> Iterator[Iterable[str]]:
        """Groups of activations, the nearest first.

        First comes what the placed activation is made from, then itself, then what stands around the operation, and
        then what those are made from.
        """
        around, backward = self.graph.activations_around, name.phase == "backward"
        if self.is_activation(name.array):
            yield self.graph.made_from(name.array, backward)
            yield [name.array]
        near = {array for path in filter(None, (*name.owners, name.array)) for array in around(path)}
        yield near
        for depth in range(len(name.modules), 0, -1):
            activations = around(modules=name.modules[:depth])
            yield activations
            near |= activations
        while further := {array for one in near for array in self.graph.made_from(one, backward)} - near:
            yield further
            near |= further
        yield filter(self.is_activation, self.arrays)

    def resharding(self, name: OpName, over: Sequence[str], weight: str) -> set[str]:
        """Rows behind a move from one split to another: those of the source and of the destination."""
        rows = self.activations(name, over) if name.phase != "optimizer" else set()
        table = "optimizer" if name.phase == "backward" else "weights"
        rows |= self.rows_splitting(table, [weight] if weight else name.owners, over)
        return rows or self.rows_mapped_to(over)

    def look_up(self, name: OpName) -> set[str]:
        """Rows that split the rows of a table in which something is looked up: they decide the form of the look-up."""
        tables = [path for path in name.owners if path in self.graph.looked_up]
        rows = [self.rows_splitting("rules", [path], self.rules.mesh, self.arrays[path][:1]) for path in tables]
        return set().union(*rows)

    def looks_up(self, name: OpName) -> bool:
        """Whether a name speaks of a look-up in a table, or of its gradient, and says nothing more."""
        return not (name.array or name.summed_axes) and any(path in self.graph.looked_up for path in name.owners)

    def statistics(self, over: Sequence[str]) -> set[str]:
        """Rows behind a sum over all weights, such as the gradient's norm: those of the weights that `over` splits."""
        split = {path: {name for axis in self.arrays[path] for name in self.rules.split("optimizer", path, axis)}
                 for path in self.weights}  # fmt: skip
        paths = [path for path in self.weights if set(over) <= split[path]]
        return self.rows_splitting("optimizer", paths, over) or self.rows_mapped_to(over)

    def rows_mapped_to(self, over: Sequence[str]) -> set[str]:
        """Every row that maps to one of the mesh axes."""
        return {row.key for row in self.rules.rows if set(over) & set(row.mesh_axes)}

    def ordered(self, keys: Iterable[str]) -> tuple[str, ...]:
        """The keys as they stand in the file."""
        keys = set(keys)
        return tuple(row.key for table in TABLES for row in self.rules.rows if row.table == table and row.key in keys)
