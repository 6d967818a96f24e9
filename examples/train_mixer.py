"""python examples/train_mixer.py --rules=examples/rules/fsdp.yaml: trains the mixer under a layout, or explains it."""

import argparse

import jax
import mixer

import gspmd_lm


def train(step, program, state, first, last):
    """The state after step `last`, and the loss of each step."""
    losses = []
    for number in range(first, last):
        batch = jax.device_put(mixer.batch(number), step.batch_shardings)
        state, metrics = program(state, batch)  # the state given is used up
        losses.append(float(metrics["loss"]))
        print(f"step {number + 1}: loss {losses[-1]:.4f}, accuracy {float(metrics['correct']):.2f}")
    return state, losses


def run(rules, steps, workdir):
    """Trains to step `steps` from the newest checkpoint in `workdir`, whatever rules it was saved under."""
    step = gspmd_lm.build(mixer.TASK, rules)
    with gspmd_lm.checkpoints(workdir, mixer.TASK) as checkpoints:
        restored = checkpoints.restore(step.abstract_state)
        first, state, _ = restored or (0, step.compile(step.lower_init())(), {})
        program = step.compile(step.lower_train())
        state, losses = train(step, program, state, first, steps)
        checkpoints.save(steps, state, {})
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", default="none", help="a rules file; none is one device")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workdir", default="runs/mixer", help="where checkpoints are")
    parser.add_argument("--dry_run", action="store_true", help="print every array, and stop")
    parser.add_argument(
        "--explain", metavar="TARGET", help="print what the layout costs there, such as cpu:8, and stop"
    )
    options = parser.parse_args()
    rules = gspmd_lm.load_rules(options.rules, mixer.TASK)
    if options.dry_run:
        print(gspmd_lm.dry_run(mixer.TASK, rules))
    elif options.explain:
        print(gspmd_lm.show(gspmd_lm.explain(mixer.TASK, rules, options.explain)))
    else:
        gspmd_lm.start(rules)
        run(rules, options.steps, options.workdir)


if __name__ == "__main__":
    try:
        main()
    except gspmd_lm.InputError as error:
        raise SystemExit(f"error: {error}") from None
