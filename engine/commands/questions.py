"""``headrace questions``: build a corpus of multi-hop video questions, look at one of them, fill a hint cache, decontaminate rows."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.commands.decontaminate import decontaminate
from headrace.commands.hints import hints

app = typer.Typer(help="Make and look at questions.", no_args_is_help=True)
app.command()(hints)
app.command()(decontaminate)


@app.command()
def hopchain(
    config: Annotated[Path, typer.Argument(help="YAML file of a corpus, e.g. configs/demo_hopchain_corpus.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.field=value, e.g. folder=data/hopchain")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete what an earlier build left and start over")] = False,
) -> None:
    """Build a Video-HopChain corpus from videos; a build that was stopped or killed goes on where it was."""
    from headrace.commands.build_progress import BuildProgress
    from headrace.config import load_model
    from headrace.generation import build
    from headrace.questions.hopchain.settings import CorpusConfig

    with BuildProgress() as progress:
        corpus = build(load_model(CorpusConfig, config, overrides or ()), fresh=fresh, watcher=progress)
    held_out = corpus.about["held_out"]
    print(corpus.summary)
    print(
        f"\nheld out: {held_out['drawn']} of {held_out['wanted']} wanted, {held_out['deviation']} off the quotas over all axes\n"
        f"corpus:   {corpus.folder}"
    )


@app.command()
def inspect(
    corpus: Annotated[Path, typer.Argument(help="Folder of a corpus")],
    question: Annotated[str | None, typer.Argument(help="Question id, e.g. scripted-000003/1; without it the first one")] = None,
    out: Annotated[Path | None, typer.Option(help="Page to write; by default under pages/ in the corpus")] = None,
) -> None:
    """Write one self-contained HTML page: the question with its shots, hops and frames."""
    from headrace.questions.hopchain.page import write_page

    print(f"page: {write_page(corpus, question, out)}")
