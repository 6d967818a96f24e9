"""Which rows of the rules file cause a collective: reasoned from the arrays that it stands between."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from gspmd_lm.foresight.graph import DataflowGraph
from gspmd_lm.sharding.op_names import OpName
from gspmd_lm.sharding.rules import TABLES, Rules

SUM, SCATTERED_SUM, GATHER, OTHER = "sum", "scattered sum", "gather", "other"  # what a movement does


class Attribution:
    """The rows of `rules` behind a movement, by one rule.

    A movement takes an array from one way of splitting to another. Its rows are those that split, over the mesh axes of
    the movement, what stands on its two sides, as far as names say it:

                   before                                after
    sum            the axes that are summed              the array, where each device keeps a piece of it
    gather         the array                             nothing: there it is whole
    other          the activations                       the weight, or its gradient

    For mesh axes to which no row of the side before maps, they are also the rows of the nearest activations that the
    axis splits. A look-up in a table has the rows that split the rows of the table besides.

    `arrays` are the model's: path of a weight or name of an activation, and its logical axes. `graph` knows which
    activations an operation stands between.
    """

    def __init__(self, rules: Rules, arrays: Mapping[str, Sequence[str]], graph: DataflowGraph):
        self.rules = rules
        self.arrays = arrays
        self.graph = graph
        self.weights = [path for path in arrays if path in graph.weights]

    def rows(self, does: str, name: OpName, over: Sequence[str], weight: str, new_weight: str) -> tuple[str, ...]:
        """Keys of the rows behind a movement over the mesh axes `over`, as they stand in the file.

        weight, new_weight: the weight that is moved, before or after the optimizer's step; '' for others.
        """
        if does in (SUM, SCATTERED_SUM):
            before, after = self._summed(name, over), set()
            if does == SCATTERED_SUM and name.array:
                after = self._splitting(name.table, [name.array], over)
            elif does == SCATTERED_SUM:
                after = self._splitting("optimizer", name.owners, over)
        elif does == GATHER and new_weight:
            at_rest = self._splitting("weights", [new_weight], over)
            before, after = self._splitting("optimizer", [new_weight], over) - at_rest, set()
        elif does == GATHER:
            before, after = self._splitting("weights", [weight] if weight else [], over), set()
        else:
            table = "optimizer" if name.phase == "backward" else "weights"
            before, after = set(), self._splitting(table, [weight] if weight else name.owners, over)
            if name.phase == "optimizer":
                before = after or self._mapped_to(over)
        mapped = {mesh_axis for row in self.rules.rows if row.key in before for mesh_axis in row.mesh_axes}
        around = self._activations(name, [mesh_axis for mesh_axis in over if mesh_axis not in mapped])
        keys = before | around | after | self._looked_up(name)
        return tuple(row.key for table in TABLES for row in self.rules.rows if row.table == table and row.key in keys)

    @property
    def of_stages(self) -> tuple[str, ...]:
        """Keys of the rows behind what stages of a pipeline send to each other."""
        return tuple(row.key for row in self.rules.rows if row.axis == self.rules.vocabulary.stages)

    def is_activation(self, array: str) -> bool:
        """Whether an array of the model is an activation."""
        return array in self.arrays and array not in self.graph.weights

    def looks_up(self, name: OpName) -> bool:
        """Whether a name speaks of a look-up in a table, or of its gradient, and says nothing more."""
        return not (name.array or name.summed_axes) and any(path in self.graph.looked_up for path in name.owners)

    def _splitting(
        self, table: str, arrays: Iterable[str], over: Collection[str], axes: Iterable[str] | None = None
    ) -> set[str]:
        """Keys of the rows by which `table` splits arrays, or some axes of them, over some of the mesh axes `over`."""
        axes_of_arrays = [
            (array, axis) for array in arrays for axis in (self.arrays.get(array, ()) if axes is None else axes)
        ]
        rows = [self.rules.row(table, *one) for one in axes_of_arrays if set(over) & set(self.rules.split(table, *one))]
        return {row.key for row in rows if row}

    def _mapped_to(self, over: Sequence[str]) -> set[str]:
        """Every row that maps to one of the mesh axes."""
        return {row.key for row in self.rules.rows if set(over) & set(row.mesh_axes)}

    def _summed(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that split what a sum adds up: the axes that its name says, the weights whose statistics are summed, or
        the batch of a gradient."""
        if name.summed_axes:
            # Of sums that were added up, the name may say one. It then places nothing.
            rows = set() if name.array else self._splitting("rules", name.owners, over)
            for path in name.summed_axes:
                array, _, axis = path.rpartition(".")
                rows |= self._splitting("rules", [array], over, [axis])
            return rows
        if name.phase == "optimizer":
            split = {path: {name for axis in self.arrays[path] for name in self.rules.split("optimizer", path, axis)}
                     for path in self.weights}  # fmt: skip
            paths = [path for path in self.weights if set(over) <= split[path]]
            return self._splitting("optimizer", paths, over) or self._mapped_to(over)
        # Where `over` splits the gradients that a weight's gradient is made from, though not the activation that they
        # are of, the compiler could gather them instead. It sums because the matmul is cut along the rows of the batch.
        rows = set()
        for matmul in self.graph.matmuls if name.phase == "backward" and name.array else ():
            x, y = matmul.input.placed, matmul.output and matmul.output.placed
            if matmul.path == name.array and x and y and not self._splitting("rules", [y.array], over):
                rows |= self._splitting("rules", [x.array], self.rules.mesh, x.axes[:1])
        return rows

    def _looked_up(self, name: OpName) -> set[str]:
        """Rows that split the rows of a table in which something is looked up: they decide the form of the look-up."""
        tables = [path for path in name.owners if path in self.graph.looked_up]
        rows = [self._splitting("rules", [path], self.rules.mesh, self.arrays[path][:1]) for path in tables]
        return set().union(*rows)

    def _activations(self, name: OpName, over: Sequence[str]) -> set[str]:
        """Rows that split activations over `over`: for each mesh axis, those of the nearest that it splits.

        What no trace knows a place of is on its way to groups, as tokens to their experts: those are split too.
        """
        rows = {key for mesh_axis in over for key in self._nearest(name, mesh_axis)}
        for matmul in self.graph.matmuls if name.array and name.array not in self.arrays else ():
            rows |= self._splitting("rules", [matmul.path], over, [matmul.group_axis] if matmul.group_axis else [])
        return rows

    def _nearest(self, name: OpName, mesh_axis: str) -> set[str]:
        for arrays in self._outward(name):
            if rows := self._splitting("rules", arrays, [mesh_axis]):
                return rows
        return self._mapped_to([mesh_axis])

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
