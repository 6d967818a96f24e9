"""config.json of published models in the words they were published with, and the settings that they must give.

golden/published.json has them, and what a config.json means that gives sizes alone, as transformers 5 has it
(test_live.py asks it).
"""

import json

from tests.convert import references

_FOUND = json.loads((references.GOLDEN / "published.json").read_text())
# Name -> config.json, and the settings that it must give, in the words of JSON.
PUBLISHED = {name: (case["config"], case["settings"]) for name, case in _FOUND["models"].items()}
LLAMA31 = PUBLISHED["llama-3.1"][0]
# model_type -> the norms' eps, rope_theta, tied tables, the activation, the size of a head.
DEFAULTS = {kind: tuple(values) for kind, values in _FOUND["defaults"].items()}
