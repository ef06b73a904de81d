"""Compiles a bundle for your own kind of prompts, then decodes with it.

    python examples/compile_domain.py --model ./my-model --prompts mail.jsonl --out bundle

The file holds one JSON object per line, `{"prompt": "…"}`, at least 6 of them and better 24 or more. The command line
does the same: `ssd-compile -m ./my-model --domain-file mine=mail.jsonl --evaluations 24 -o bundle`.
"""

import argparse
from pathlib import Path

from ssd_compiler.build import compile_bundle
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import CompileSettings
from ssd_profiles.errors import UserError
from ssd_runtime import Engine, RunSettings

parser = argparse.ArgumentParser(description="Compile a bundle for your own prompts.")
parser.add_argument("--model", default="demo")
parser.add_argument("--prompts", required=True, type=Path)
parser.add_argument("--evaluations", type=int, default=24)
parser.add_argument("--out", type=Path, default=Path("bundle"))
arguments = parser.parse_args()

settings = CompileSettings(
    model=arguments.model,
    domains=(),  # packaged ones, such as "gsm8k"
    domain_files=(("mine", str(arguments.prompts)),),
    evaluations=arguments.evaluations,
)
try:
    bundle = compile_bundle(settings, arguments.out.resolve(), resume=False, reporter=Reporter())
except UserError as error:  # for instance on a machine that is too busy to be measured
    raise SystemExit(f"error: {error}") from None
validation = bundle.domains["mine"].validation
if validation is None:
    print("no mask can pay on this device: auto will draft without skipping layers")
else:
    print(f"masks of this domain: {validation.speedup:.2f}x of plain decoding on prompts that the search never saw")

engine = Engine.open(arguments.out, arguments.model)
print(engine.generate(["Write a short mail to a friend."], RunSettings(max_new_tokens=48))[0].text)
