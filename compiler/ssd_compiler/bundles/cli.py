"""The command `ssd-bundle`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ssd_artifacts.bundle import require_free_out
from ssd_artifacts.files import clear_leftovers, write_atomically, write_lock
from ssd_artifacts.manifest import ARCHIVE_SUFFIX, REPORT_PAGE
from ssd_artifacts.sharing.archive import archive_bytes, pack
from ssd_artifacts.sharing.departing import departing
from ssd_artifacts.sharing.hub import push_to_hub
from ssd_artifacts.sharing.opening import OpenedBundle, open_bundle
from ssd_artifacts.sharing.privacy import private_parts
from ssd_artifacts.sharing.receiving import receive
from ssd_artifacts.sharing.reference import Reference, read_reference
from ssd_artifacts.sharing.registry import push_to_registry
from ssd_artifacts.sharing.signature import sign
from ssd_compiler.bundles.card import card_text
from ssd_compiler.bundles.difference import differences
from ssd_compiler.bundles.summary import summary_text
from ssd_compiler.report.html import html_report
from ssd_compiler.report.summary import domain_summary
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import read_prompts
from ssd_runtime.commands.command import closing, command_app, run_command
from ssd_runtime.commands.options import DeviceOption, DtypeOption, SignatureOption, VersionOption

CLOSING = closing(
    "Look:      ssd-bundle inspect bundle",
    "Check:     ssd-bundle verify bundle --model ./my-model",
    "Archive:   ssd-bundle pack bundle --strip",
    "Share:     ssd-bundle push bundle hf://org/name --strip",
    "Fetch:     ssd-bundle pull oci://host/name:tag --out bundle",
    codes="Exit codes: 0 success; 1 `diff` found a difference; 2 bad input; 130 interrupted.",
)
app = command_app(no_args_is_help=True)
WHAT = "A folder, an archive, hf://…, oci://… or `demo`."
BundleArgument = Annotated[str, typer.Argument(metavar="BUNDLE", help=WHAT)]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Where the bundle goes.")]
StripOption = Annotated[
    bool,
    typer.Option("--strip", help="Leave out token pairs, vectors for later domains, the compile's options and paths."),
]
KeyOption = Annotated[Path | None, typer.Option("--key", help="A private key (PEM, P-256) that signs what leaves.")]


@app.callback(epilog=CLOSING)
def bundles(version: VersionOption = False) -> None:
    """Look into bundles, check them, and bring them to other machines."""


@app.command()
def inspect(
    bundle: BundleArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Print what a bundle is for, its masks and figures, and what is private in it."""
    opened = open_bundle(bundle)
    if not as_json:
        print(summary_text(opened.bundle, opened.folder))
        return
    layers = opened.bundle.model.num_layers
    about = {
        "model": opened.bundle.model.model_dump(mode="json"),
        "created": opened.bundle.created,
        "domains": [domain_summary(config, layers) for config in opened.bundle.domains.values()],
        "private": private_parts(opened.bundle),
    }
    print(json.dumps(about))


@app.command()
def verify(
    bundle: BundleArgument,
    require_signature: SignatureOption = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Compare all of this model's weights with the bundle's, not samples alone."),
    ] = None,
) -> None:
    """Check every file of a bundle, its signature by --require-signature, and its model by --model."""
    opened = open_bundle(bundle, require_signature)
    if model is not None:
        _verify_model(opened, model)
    signed = f", signed by {require_signature}" if require_signature is not None else ""
    matched = f", of {model}: all weights match" if model is not None else ""
    print(f"{bundle}: valid{signed}{matched}")


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="ONE", help=WHAT)],
    second: Annotated[str, typer.Argument(metavar="OTHER", help=WHAT)],
) -> None:
    """Print what differs between two bundles; exit code 1 if anything does."""
    found = differences(open_bundle(first).bundle, open_bundle(second).bundle)
    for line in found:
        print(line)
    if found:
        raise typer.Exit(1)


@app.command("pack")
def pack_(
    bundle: BundleArgument,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help=f"The archive; NAME{ARCHIVE_SUFFIX} by default.")
    ] = None,
    strip: StripOption = False,
    key: KeyOption = None,
) -> None:
    """Write a bundle as one file, whose bytes depend on the bundle alone."""
    opened = open_bundle(bundle)
    inside = opened.folder.resolve()
    archive = out if out is not None else Path(f"{inside.name}{ARCHIVE_SUFFIX}")
    if archive.is_dir():
        raise UserError(f"--out: {archive} is a folder; name a file")
    if archive.resolve().is_relative_to(inside):
        raise UserError(f"--out: {archive} would lie in the bundle, which has no such file; name one elsewhere")
    with departing(opened.folder, strip, key) as folder:
        pack(folder, archive)
    print(f"{archive}: {archive.stat().st_size} bytes")


@app.command()
def unpack(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A file that `ssd-bundle pack` wrote.")],
    out: OutOption = Path("bundle"),
) -> None:
    """Check an archive and write its bundle as a folder, with a report made here."""
    _receive(Reference(str(archive), "archive", str(archive)), out)


@app.command()
def pull(
    place: Annotated[str, typer.Argument(metavar="PLACE", help="hf://org/name@revision or oci://host/name:tag.")],
    out: OutOption = Path("bundle"),
) -> None:
    """Fetch a bundle into a folder and check it, with a report made here."""
    _receive(_remote(place), out)


@app.command()
def push(
    bundle: BundleArgument,
    place: Annotated[str, typer.Argument(metavar="PLACE", help="hf://org/name or oci://host/name:tag.")],
    strip: StripOption = False,
    key: KeyOption = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository of the Hub.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Upload a bundle, after saying what leaves the machine."""
    reference = _remote(place)
    if private and reference.kind != "hub":
        raise UserError(
            "--private: only the Hub's repositories are made so; omit it, and set the registry's own rights"
        )
    opened = open_bundle(bundle)
    with departing(opened.folder, strip, key) as folder:
        leaving = open_bundle(folder).bundle
        print(f"To {place} go {archive_bytes(folder)} bytes, and with them:")
        for part in private_parts(leaving):
            print(f"  {part}")
        if not yes:
            _confirm("Push it?")
        card = card_text(leaving, place)
        if reference.kind == "hub":
            print(push_to_hub(folder, reference, card, private))
        else:
            annotations = {
                "org.opencontainers.image.title": f"Bundle for {leaving.model.name}",
                "org.opencontainers.image.created": leaving.created,
            }
            print(push_to_registry(folder, reference, annotations))


@app.command("sign")
def sign_(
    bundle: Annotated[Path, typer.Argument(help="A bundle's folder.")],
    key: Annotated[Path, typer.Option("--key", help="A private key: PEM, P-256.")],
) -> None:
    """Sign a bundle with a key."""
    if not bundle.is_dir():
        raise UserError(f"{bundle}: not a bundle's folder; sign that, or use pack --key")
    print(sign(bundle, key))


@app.command("adopt")
def adopt_(
    bundle: BundleArgument,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="The model to adopt the bundle for: other files of its model, or a fine-tune."
        ),
    ],
    out: OutOption,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts to measure on; the domains' starter prompts by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="About how long to measure, in seconds.")] = 60.0,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Make a bundle for another form of its model: measure how well its masks draft there, or say why not."""
    opened = open_bundle(bundle)
    given = read_prompts(prompts) if prompts is not None else []
    require_free_out(out)

    # These imports take seconds and come last, so that bad input is answered at once.
    from ssd_compiler.bundles.adopt import adopt
    from ssd_compiler.decoder import faithful_decoder
    from ssd_compiler.progress import Reporter
    from ssd_runtime.loading.models import load_model

    loaded = load_model(model, device, dtype)
    adopted, masks = adopt(
        bundle=opened.bundle,
        loaded=loaded,
        decoder=faithful_decoder(loaded),
        where=bundle,
        seconds=seconds,
        prompts=given,
        reporter=Reporter(),
    )
    page = html_report(adopted)
    with write_lock(out):
        clear_leftovers(out)
        require_free_out(out)  # what was put there while this measured must not be lost
        adopted.save(out, page)
    for mask in masks:
        print(
            f"{mask.domain}: agreement {mask.compiled:.3f} compiled, {mask.measured:.3f} on {mask.positions} tokens "
            f"here; {'acceptance kept' if mask.kept else 'acceptance measured anew'}"
        )
    print(f"{out}: bundle for {adopted.model.name}, not signed, never timed")


@app.command()
def report(
    bundle: BundleArgument,
    out: Annotated[
        Path | None,
        typer.Option(help=f"The page; BUNDLE/{REPORT_PAGE} by default; {REPORT_PAGE} where BUNDLE is no folder."),
    ] = None,
) -> None:
    """Make a bundle's report again on this machine."""
    opened = open_bundle(bundle)
    # Elsewhere the folder is the package's or the cache's, which are no place for a user's page.
    own = opened.folder if opened.folder == Path(bundle) else Path()
    page = out if out is not None else own / REPORT_PAGE
    write_atomically(page, html_report(opened.bundle))
    print(page)


def main() -> None:
    """Run the command. A user's mistake ends it with one line and exit code 2."""
    run_command(app)


def _remote(place: str) -> Reference:
    reference = read_reference(place)
    if not reference.is_remote:
        raise UserError(f"{place}: no place on the Hub or in a registry; give hf://org/name or oci://host/name:tag")
    return reference


def _confirm(question: str) -> None:
    """Ask on standard input, and abort unless the answer is yes. Raises UserError if there is nobody to ask."""
    try:
        typer.confirm(question, abort=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UserError("push: not confirmed, and no terminal to ask on; give --yes to upload without asking") from None


def _receive(reference: Reference, out: Path) -> None:
    folder = receive(reference, out)
    opened = open_bundle(folder)
    write_atomically(folder / REPORT_PAGE, html_report(opened.bundle))
    print(f"{folder}: bundle for {opened.bundle.model.name}, domains: {', '.join(opened.bundle.domains)}")


def _verify_model(opened: OpenedBundle, model: str) -> None:
    """Raise UserError unless all weights of the model are the bundle's."""
    from ssd_runtime.loading.models import load_model, weights_of

    known = opened.bundle.model
    loaded = load_model(model, "cpu", None, weights_of(opened.bundle, model)).fingerprint(full=True, cached=False)
    known.require_same_model(loaded, opened.where)
    if known.weights_sha256 != loaded.weights_sha256:
        raise UserError(f"{opened.where}: made from other weights than those of {model}; give the bundle's own model")
