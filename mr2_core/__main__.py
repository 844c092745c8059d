"""``python -m mr2_core run|report|list|extract``: a study's missing runs, its table, what there is, frozen features."""

import argparse
import sys
from pathlib import Path

RESULTS = Path("data") / "results"


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and do what it says; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mr2_core", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="do what is missing of a study")
    report = commands.add_parser("report", help="print a study's table")
    for command in (run, report):
        command.add_argument("study", type=Path, help="a TOML file, such as studies/cifar100-compact.toml")
        command.add_argument(
            "--results", type=Path, default=RESULTS, help="where results are kept (default: %(default)s)"
        )
    run.add_argument("--arm", action="append", help="only this arm (may be repeated)")
    run.add_argument("--seed", action="append", type=int, help="only this seed (may be repeated)")
    run.add_argument("--jobs", type=int, default=1, help="runs at a time, of several each on one thread (default: 1)")
    run.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    run.add_argument("--workers", type=int, default=4, help="processes that read images from disk (default: 4)")
    run.add_argument(
        "--budget", type=duration, help="stop after this long, such as 90s, 20m or 2h; runs go on next time"
    )
    run.add_argument(
        "--shard",
        type=shard,
        default=(0, 1),
        help="i/n: every n-th run from the i-th, counted from 1, as in a job array",
    )
    report.add_argument(
        "--reference",
        action="append",
        help="compare with this arm, without the table of all endpoints at once (default: those of the endpoints)",
    )
    report.add_argument(
        "--ranking", default="all", help="whose validation accuracy makes the thirds, as erm+mr2 (default: all arms)"
    )
    report.add_argument(
        "--format",
        choices=("text", "markdown", "latex", "csv"),
        default="text",
        help="csv has all digits, without the table of all endpoints at once (default: text)",
    )
    commands.add_parser("list", help="list methods and models")
    extract = commands.add_parser("extract", help="write a pretrained backbone's features of a dataset")
    extract.add_argument("dataset", help="such as cifar100, pets or folder")
    extract.add_argument("name", metavar="backbone", help="such as efficientnet-lite0, mae-b16 or clip-b16")
    where = "where the images lie (default: raw in the book's data folder; for cifar100 that folder itself)"
    extract.add_argument("--root", type=Path, help=where)
    extract.add_argument("--out", type=Path, help="file to write (default: _runs/features/DATASET-BACKBONE.npz)")
    extract.add_argument("--weights", type=Path, help="a file of weights in place of the official ones")
    extract.add_argument("--size", type=int, help="side in pixels (default: that of the backbone)")
    extract.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    extract.add_argument("--workers", type=int, default=0, help="processes that read images (default: 0)")
    options = parser.parse_args(arguments)
    try:
        return {"run": do_run, "report": do_report, "list": do_list, "extract": do_extract}[options.command](options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def do_run(options) -> int:
    """Do the missing runs; status 3 if some are still missing."""
    from mr2_core.studies import read_study, run_study
    from mr2_core.training import process_group

    runs = read_study(options.study, options.results)
    for name in ("arm", "seed"):
        wanted, known = getattr(options, name), {getattr(run, name) for run in runs}
        if wanted and (unknown := set(wanted) - known):
            raise ValueError(
                f"the study has no {name} {', '.join(map(str, unknown))}; it has {', '.join(map(str, sorted(known)))}."
            )
        runs = [run for run in runs if not wanted or getattr(run, name) in wanted]
    index, of = options.shard
    with process_group(options.device) as device:
        missing = run_study(
            runs[index::of], jobs=options.jobs, device=device, budget=options.budget, workers=options.workers
        )
        print(f"{missing} runs are still missing; the same command goes on." if missing else "All runs are done.")
    return 3 if missing else 0


def do_report(options) -> int:
    """Print a table for each reference arm; as CSV with every number, else as people read it."""
    from mr2_core.studies import in_words, joint, read_endpoints, read_study, readable, table

    runs, endpoints = read_study(options.study, options.results), read_endpoints(options.study)
    for reference in options.reference or endpoints["references"]:
        frame = table(runs, reference=reference, ranking=options.ranking, easy_margin=endpoints["easy_margin"])
        if options.format == "csv":
            print(frame.to_csv(index_label="arm"))
            continue
        print(
            f"{frame['seeds'].sum()} of {len(runs)} runs are done; thirds by {options.ranking}; Δ against {reference}\n"
            "Accuracy in per cent; Δ in points, paired by seed, in brackets the 95 % interval of one comparison\n"
        )
        shown = readable(frame)
        print(
            {"text": shown.to_string, "markdown": shown.to_markdown, "latex": shown.to_latex}[options.format](),
            end="\n\n",
        )
    if "hard gains" in frame and not options.reference and options.format != "csv":
        whole = joint(runs, **endpoints, ranking=options.ranking)
        whole = whole.assign(succeeds=whole.pop("succeeds").map({True: "yes", False: "no"}))
        print(
            f"All endpoints at once: hard third above {' and '.join(endpoints['references'])}, easy third kept\n"
            "p is the larger of both, each the largest over the references, after Holm over the arms\n"
        )
        shown = whole.map(lambda value: value if isinstance(value, str) else in_words(value))
        print({"text": shown.to_string, "markdown": shown.to_markdown, "latex": shown.to_latex}[options.format]())
    return 0


def do_list(_) -> int:
    """Print the registries."""
    from mr2_core.methods import METHODS
    from mr2_core.models import BACKBONES

    for name, method in METHODS.items():
        print(f"{name:18} {method.year}  {method.paper}")
    print("models:", ", ".join(BACKBONES))
    return 0


def do_extract(options) -> int:
    """Write a features file, or go on with it; its arguments are those of :func:`mr2_core.extract.extract`."""
    from mr2_core.extract import extract

    print(extract(**{name: value for name, value in vars(options).items() if name != "command"}))
    return 0


def duration(text: str) -> float:
    """Seconds from a number with s, m or h behind it."""
    try:
        return float(text[:-1]) * {"s": 1, "m": 60, "h": 3600}[text[-1]]
    except (KeyError, ValueError, IndexError):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration; expected a number and s, m or h, such as 20m"
        ) from None


def shard(text: str) -> tuple[int, int]:
    """(index from 0, count) from i/n."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; expected i/n with 1 ≤ i ≤ n, such as 2/8")
    return int(index) - 1, int(count)


if __name__ == "__main__":
    sys.exit(main())
