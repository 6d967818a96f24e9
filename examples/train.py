"""python examples/train.py vit --rules=examples/rules/plain_fsdp.yaml: trains a model of others, or explains it."""

import argparse
import importlib

import gspmd_lm


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=("classifier", "vit", "reverser"), help="a file of examples/")
    parser.add_argument("--rules", default="none", help="a rules file; none is one device")
    parser.add_argument("--steps", type=int, help="where to stop; by default at the end")
    parser.add_argument("--workdir", help="of a run that goes on from its newest checkpoint; by default a new one")
    parser.add_argument("--dry_run", action="store_true", help="print every array, and stop")
    parser.add_argument("--explain", metavar="TARGET", help="print what the layout costs there, such as cpu:8")
    parser.add_argument("--plan", metavar="TARGET", help="print the best layouts there, such as cpu:8")
    flags = parser.parse_args()
    model = importlib.import_module(flags.model)
    if flags.dry_run:
        print(gspmd_lm.dry_run(model.TASK, flags.rules))
    elif flags.explain:
        print(gspmd_lm.explain(model.TASK, flags.rules, flags.explain))
    elif flags.plan:
        print(gspmd_lm.plan(model.TASK, flags.plan))
    else:
        gspmd_lm.train(model.TASK, flags.rules, flags.workdir, flags.steps, data=model.batch, held_out=model.HELD_OUT)


if __name__ == "__main__":
    try:
        main()
    except gspmd_lm.InputError as error:
        raise SystemExit(f"error: {error}") from None
