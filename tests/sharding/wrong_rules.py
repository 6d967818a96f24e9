"""Rules files with which something is wrong. What each is told is recorded in golden/rules_errors.txt."""

import dataclasses

TP = "mesh: {tensor: 8}\nrules: {heads: tensor, kv_heads: tensor, mlp: tensor, vocab: tensor}\n"
DP = "mesh: {data: 8}\nrules: {batch: data}\n"
PP = "mesh: {stage: 4, fsdp: 2}\nrules: {batch: [stage, fsdp]}\nweights: {layers: stage}\n"
CLIP = ("objective=contrastive", "model.positions=learned", "data.source_seq=24",
        "model.vision={patches: {image: 16, size: 4}, projection: 16}")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A rules file that is wrong, perhaps only for some config, machine or --mesh."""

    text: str
    overrides: tuple[str, ...] = ()
    devices: int = 8
    platform: str = "cpu"
    mesh: str = ""
    sets: tuple[str, ...] = ()  # of the rules


WRONG = {
    # The file itself
    "not YAML": Case("mesh: {tensor: 8\nrules:\n"),
    "a key twice": Case("mesh: {tensor: 8}\nrules:\n  heads: tensor\n  heads: null\n"),
    "a list": Case("- tensor\n"),
    "a word": Case("tp8\n"),
    "empty": Case("# nothing\n"),
    "unknown section": Case(TP + "rulez: {batch: tensor}\n"),
    "sections that are no mappings": Case(
        "mesh: {tensor: 8}\nrules: tensor\nweights: [embed]\nattention: xla\ndcn: 2\n"
    ),
    # The mesh
    "no mesh": Case("rules: {heads: tensor}\n"),
    "mesh is a number": Case("mesh: 8\nrules: {heads: tensor}\n"),
    "unknown mesh axis": Case("mesh: {tenser: 8}\nrules: {heads: tenser}\n"),
    "size below 1": Case("mesh: {tensor: 8, data: 0}\nrules: {heads: tensor, batch: data}\n"),
    "size is no number": Case(
        "mesh: {tensor: 8, data: two, fsdp: 1.5, context: -1.0}\nrules: {heads: tensor, batch: [data, fsdp]}\n"
    ),
    "two sizes of -1": Case("mesh: {data: -1, tensor: -1}\nrules: {heads: tensor, batch: data}\n"),
    "mesh bigger than the devices": Case("mesh: {data: 4, tensor: 4}\nrules: {heads: tensor, batch: data}\n"),
    "mesh smaller than the devices": Case("mesh: {data: 2, tensor: 2}\nrules: {heads: tensor, batch: data}\n"),
    "mesh whose one axis cannot fill the devices": Case(TP, devices=64),
    "mesh whose batch cannot fill the devices": Case(DP, devices=64),
    "mesh that no size makes fit": Case("mesh: {data: 3, tensor: 3}\nrules: {heads: tensor, batch: data}\n"),
    "-1 beside a size that does not fit": Case("mesh: {data: -1, tensor: 3}\nrules: {mlp: tensor, batch: data}\n"),
    "--mesh names no axis": Case(TP, mesh="tenser=4"),
    "--mesh without a size": Case(TP, mesh="tensor"),
    "--mesh with a colon": Case(TP, mesh="tensor:8"),
    "--mesh with a word": Case(TP, mesh="tensor=four"),
    "--mesh with a digit that is no number": Case(TP, mesh="tensor=²"),
    "--mesh with an axis twice": Case(TP, mesh="tensor=4,tensor=8"),
    "--mesh that does not fill the devices": Case(TP, mesh="tensor=4"),
    # What --set lays over the file
    "--set of no section": Case(TP, sets=("rules.remt=block",)),
    "--set of a row without its table": Case(TP, sets=("rules.residual.seq=tensor",)),
    "--set without a key": Case(TP, sets=("rules={batch: data}",)),
    "--set without a value": Case(TP, sets=("rules.remat",)),
    "--set that is not YAML": Case(TP, sets=("rules.mesh={tensor: 8",)),
    "--set of a row of what has none": Case(TP, sets=("rules.remat=block", "rules.remat.save=[q]")),
    "--set of an unknown axis": Case(TP, sets=("rules.rules.hed=tensor",)),
    "--set of an unknown mesh axis": Case(TP, sets=("rules.mesh.tenser=2",)),
    "--set of a size that is none": Case(TP, sets=("rules.mesh.tensor=four",)),
    "--set of an unknown policy": Case(TP, sets=("rules.remat=blok",)),
    "--set of an unknown kernel": Case(TP, sets=("rules.attention.gpu=cudn",)),
    "--set of a row that does not divide": Case(TP, ("model.kv_heads=2",), sets=("rules.rules.wk.kv_heads=tensor",)),
    "--set of a row that does nothing": Case(TP, sets=("rules.weights.residul.seq=tensor",)),
    "--set of sizes that do not fill the devices": Case(TP, sets=("rules.mesh.data=2", "rules.rules.batch=data")),
    "--set of a whole table": Case(TP, sets=("rules.rules={batch: tensr}",)),
    "--set of dcn that does not divide": Case(TP, sets=("rules.dcn.tensor=3",)),
    # Rows
    "unknown axis": Case("mesh: {tensor: 8}\nrules: {head: tensor}\n"),
    "unknown axis of an array": Case("mesh: {tensor: 8}\nrules: {residual.sequence: tensor}\n"),
    "an array without its axis": Case("mesh: {tensor: 8}\nrules: {residual: tensor}\n"),
    "unknown array": Case("mesh: {tensor: 8}\nrules: {residul.seq: tensor}\n"),
    "unknown path": Case("mesh: {tensor: 8}\nrules: {layers.atention.wq.heads: tensor}\n"),
    "array lacks the axis": Case("mesh: {tensor: 8}\nrules: {wq.mlp: tensor}\n"),
    "mesh axis that the mesh lacks": Case("mesh: {tensor: 8}\nrules: {heads: tensr, batch: fsdp}\n"),
    "a list of mesh axes without brackets": Case("mesh: {data: 2, fsdp: 4}\nrules: {batch: 'data, fsdp'}\n"),
    "a list of mesh axes that are words": Case("mesh: {data: 2, fsdp: 4}\nrules: {batch: data fdsp}\n"),
    "mesh axis twice in a row": Case("mesh: {tensor: 8}\nrules: {heads: [tensor, tensor]}\n"),
    "targets that are no names": Case("mesh: {tensor: 8}\nrules: {heads: 8, batch: {tensor: 2}, mlp: [[tensor]]}\n"),
    "activation in the table of weights": Case(DP + "weights: {residual.seq: data}\noptimizer: {batch: data}\n"),
    # What does not fit the model
    "mesh axis twice in one weight": Case("mesh: {tensor: 8}\nrules: {heads: tensor}\nweights: {embed: tensor}\n"),
    "mesh axis twice in one activation": Case("mesh: {tensor: 8}\nrules: {batch: tensor, mlp: tensor}\n"),
    "batch over the mesh axis of four other rows": Case(TP.replace("{heads", "{batch: tensor, heads")),
    "embed over the mesh axis of four other rows": Case(TP.replace("{heads", "{embed: tensor, heads")),
    "two rows that meet others": Case(
        "mesh: {fsdp: 2, tensor: 4}\nrules: {batch: fsdp, mlp: tensor, heads: tensor, kv_heads: tensor, seq: tensor}\n"
        "weights: {embed: fsdp, vocab: fsdp}\n"
    ),
    "weight that does not divide": Case(TP, ("model.kv_heads=2",)),
    "weight that does not divide over two": Case(
        "mesh: {fsdp: 2, tensor: 4}\nrules: {heads: [fsdp, tensor]}\n", ("model.heads=6", "model.kv_heads=2")
    ),
    "optimizer row that does not divide": Case(DP + "optimizer: {w_up.mlp: data}\n", ("model.mlp=100",)),
    "activation that does not divide": Case("mesh: {tensor: 8}\nrules: {residual.seq: tensor}\n", ("data.seq=100",)),
    "logits that do not divide": Case("mesh: {tensor: 8}\nrules: {logits.seq: tensor}\n", ("data.seq=100",)),
    "mesh axis twice in the logits": Case("mesh: {tensor: 8}\nrules: {logits.seq: tensor, vocab: tensor}\n"),
    "mesh axis twice in keys that are repeated": Case("mesh: {tensor: 8}\nrules: {heads: tensor, kv_seq: tensor}\n"),
    "batch that does not divide": Case(DP, ("data.batch=12",)),
    "vocabulary that does not divide": Case(TP, ("model.padded_vocab=0",)),
    "batch of one row": Case(DP, ("data.batch=1",)),
    "microbatch that does not divide": Case(DP + "microbatches: 8\n"),
    "microbatches that do not divide the batch": Case(DP + "microbatches: 3\n"),
    "microbatches below 1": Case(DP + "microbatches: 0\n"),
    # How it runs
    "unknown remat policy": Case(DP + "remat: blocks\n"),
    "remat of nothing": Case(DP + "remat:\n"),
    "remat of names in quotes": Case(DP + "remat: '{save: [q, k, v], offload: [residual]}'\n"),
    "remat of unknown arrays": Case(DP + "remat: {save: [q, residul, wq, logits, [k]], ofload: [v]}\n"),
    "remat that is no list": Case(DP + "remat: {save: q}\n"),
    "remat that saves and offloads": Case(DP + "remat: {save: [q, k], offload: [k]}\n"),
    "unknown kernel": Case(DP + "attention: {cpu: cudnn, gpu: cudn, tpu: splash, tup: xla}\n"),
    "cudnn and soft-cap": Case(
        DP + "attention: {gpu: cudnn}\n", ("data.packing=stream", "model.attention.softcap=50.0"), platform="gpu"
    ),
    "cudnn and gathered keys": Case(
        "mesh: {context: 8}\nrules: {seq: context}\nattention: {gpu: cudnn}\n", ("data.packing=stream",), platform="gpu"
    ),
    "cudnn and a bias by distance": Case(
        DP + "attention: {gpu: cudnn}\n",
        ("data.packing=stream", "model.attention.relative_positions={}"),
        platform="gpu",
    ),
    "a ring and a full mask": Case(
        "mesh: {context: 8}\nrules: {seq: context}\ncontext: ring\n", ("objective=masked", "model.attention.mask=full")
    ),
    "splash and a short sequence": Case(DP + "attention: {tpu: splash}\n", ("data.seq=96",), platform="tpu"),
    "compiler options of no platform": Case(DP + "compiler_options: {cuda: {a: 1}, gpu: true}\n"),
    "more devices than a mesh has": Case("mesh: {data: 10000000000}\nrules: {batch: data}\ndcn: {data: 2}\n"),
    "dcn and no mesh": Case("rules: {batch: data}\ndcn: {data: 2}\n"),
    "dcn of no axis": Case(DP + "dcn: {dat: 2}\n"),
    "dcn that is no number": Case(DP + "dcn: {data: 0}\n"),
    "dcn that does not divide": Case(DP + "dcn: {data: 3}\n"),
    "dcn that does not divide what -1 becomes": Case("mesh: {data: -1}\nrules: {batch: data}\ndcn: {data: 3}\n"),
    # A pipeline
    "pipeline without stages": Case(DP + "pipeline: {microbatches: 4}\n"),
    "pipeline without microbatches": Case(PP + "pipeline: {repeats: 2}\n"),
    "pipeline that is no mapping": Case(PP + "pipeline: 4\n"),
    "unknown key of a pipeline": Case(PP + "pipeline: {microbatch: 4, repeats: 0}\n"),
    "layers that do not divide into stages": Case(PP + "pipeline: {microbatches: 4}\n", ("model.layers=6",)),
    "a pipeline and a bias by distance": Case(
        PP + "pipeline: {microbatches: 4}\n", ("model.attention.relative_positions={}",)
    ),
    "layers that do not divide into repeats": Case(PP + "pipeline: {microbatches: 4, repeats: 2}\n"),
    "a pattern cut in half": Case(
        PP + "pipeline: {microbatches: 4}\n",
        ("model.layers=8", "model.layer_pattern=[sliding, sliding, sliding, full]", "model.attention.window=8"),
    ),
    "microbatches that are no multiple of the stages": Case(PP + "pipeline: {microbatches: 6}\n", ("data.batch=24",)),
    "a batch that does not divide into rows of a stage": Case(PP + "pipeline: {microbatches: 16}\n"),
    "microbatches of a pipeline in microbatches": Case(PP + "microbatches: 4\npipeline: {microbatches: 4}\n"),
    "pipeline of several residual streams": Case(
        PP + "pipeline: {microbatches: 4}\n",
        (
            "model.residual.streams=2",
            "model.residual.layer_embed=8",
            "model.residual.layer_vocab=50",
            "model.attention.shared_kv_layers=2",
        ),
    ),
    "pipeline of layers that share their weights": Case(
        PP + "pipeline: {microbatches: 4}\n", ("model.shared_layers=true",)
    ),
    "pipeline whose optimizer splits layers otherwise": Case(
        PP + "pipeline: {microbatches: 4}\noptimizer: {layers: fsdp}\n"
    ),
    "pipeline and loads of the whole batch": Case(
        PP + "pipeline: {microbatches: 4}\n",
        ("model.experts.count=8", "model.experts.per_token=2", "model.experts.balance=batch"),
    ),
    # Texts that are compared with the images of the whole batch
    "microbatches and a loss of the whole batch": Case(DP + "microbatches: 2\n", CLIP),
    "pipeline of two towers": Case(PP + "pipeline: {microbatches: 4}\n", CLIP),
    "ulysses of a tower whose heads do not divide": Case(
        "mesh: {context: 8}\nrules: {seq: context, kv_seq: context}\ncontext: ulysses\n",
        (*CLIP[:-1], CLIP[-1].replace("projection", "heads: 4, kv_heads: 4, projection")),
    ),
    "ring of two towers": Case("mesh: {context: 8}\nrules: {seq: context, kv_seq: context}\ncontext: ring\n", CLIP),
    # Rows in parts
    "interleave that is no number": Case(DP + "interleave: two\n"),
    "a buffer of experts that is too small": Case(DP + "expert_buffer: 0.5\n"),
    "rows that do not divide into parts": Case(DP + "interleave: 3\n"),
    "rows of a microbatch that do not divide into parts": Case(DP + "microbatches: 2\ninterleave: 2\n"),
    "parts of layers that have none": Case(
        DP + "interleave: 2\n", ("model.experts.count=8", "model.experts.per_token=2", "model.residual.streams=2")
    ),
    "everything at once": Case(
        "mesh: {tensor: 4, dat: 1}\nrules: {heads: tensr, mlp: tensor, residul.seq: tensor}\nremat: blok\nextra: 1\n",
        ("model.mlp=30",),
    ),
}
