"""What the words of pages mean, for readers who do not know them."""

MEANINGS = {
    "compiled": "Read from the program that the compiler made for the target: exact.",
    "predicted": "Computed from the compiled program with a model of the hardware. The page says how far such "
    "predictions were off.",
    "measured": "Logged by a run while it went on.",
    "counted": "Follows from the shapes of the model and from the rules alone.",
    "peak memory": "The most memory of one device that is in use at once.",
    "temporaries": "What is in memory during a step only: activations, gradients and scratch space.",
    "limit": "The memory of a device that a program may use.",
    "tokens/s per device": "Tokens of a step over its time and the number of devices.",
    "MFU": "Model FLOPs utilisation: FLOPs that the model needs per second, without those of recomputation, as a share "
    "of what the chip can do. Of attention, only the keys that a token sees count.",
    "exposed communication": "The part of a step in which compute waits for other devices. What is sent while compute "
    "goes on takes no time.",
    "floor": "The least that any program must compute, read or send when the model is split so.",
    "split at rest": "The mesh axes that split an array between steps.",
    "split in use": "The mesh axes that split an array while a layer computes.",
    "overlaps": "Whether compute goes on while it is sent.",
    "because of": "The rows of the rules file that make it necessary.",
    "recomputation": "Activations that were not kept are computed again in the backward pass.",
    "collective": "An operation in which devices exchange data, such as an all-gather.",
}
