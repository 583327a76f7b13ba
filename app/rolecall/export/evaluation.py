"""`rolecall eval`: calls a job's `evaluate` or `complete` with a checkpoint, and options for its keyword-only
parameters."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, get_type_hints

from pydantic import BaseModel, ValidationError, create_model

from rolecall import fields
from rolecall.declare import loader, registry
from rolecall.declare.spec import Job
from rolecall.errors import UsageError
from rolecall.export import saved

RESERVED = {"job", "checkpoint", "json", "prompt", "help"}  # options of the command


@saved.guarded
def run(words: Sequence[str]) -> int:
    """Evaluates the checkpoint that `words` name and prints the result. Returns the exit code. Raises UsageError, and
    SystemExit as argparse does.
    """
    first, _ = parser(full=False).parse_known_args(words)
    if first.job is None:
        parser().parse_args(words)  # prints help, or that JOB is missing
    job, name = registry.get(first.job), registry.name_of(first.job)
    called = "evaluate" if first.prompt is None else "complete"
    function = _function(job, name, called)
    options = _options(function, name, {*RESERVED, *saved.flags(job)})
    arguments, unknown = parser(options, name, job=job).parse_known_args(words)
    if unknown:
        takes = ", ".join(map(saved.flag, [*options.model_fields, *saved.flags(job)])) or "none"
        raise UsageError(f"{unknown[0].partition('=')[0]}: {name}'s {called} has no such option; it takes {takes}")
    given = {option: value for option, value in vars(arguments).items() if option in options.model_fields}
    try:
        chosen = options(**given)
    except ValidationError as error:
        raise UsageError("; ".join(fields.problems(options, error, saved.flag))) from None
    one = saved.load(job, name, arguments, "evaluate it with that version")
    prompt = () if arguments.prompt is None else (arguments.prompt,)
    with one.errors():
        values = {option: getattr(chosen, option) for option in given}
        result = function(one.settings, one.snapshot.state, *prompt, **values)
    if prompt:
        print(json.dumps({"text": result}) if arguments.json else result)
        return 0
    numbers = one.numbers(result)
    listed = ", ".join(f"{what} {value:g}" for what, value in numbers.items())
    print(json.dumps(numbers) if arguments.json else f"{one.snapshot.path.name}: {listed}")
    return 0


def parser(
    options: type[BaseModel] | None = None, name: str = "", full: bool = True, job: Job | None = None
) -> argparse.ArgumentParser:
    """The command's arguments, with the options of the job `name`, and flags of `job`; without `full`, none is
    required."""
    parser = saved.parser("rolecall eval", "Evaluates a checkpoint.", full)
    parser.add_argument("--prompt", metavar="TEXT", help="generate a continuation of TEXT instead")
    group = parser.add_argument_group(f"options of {name}") if options and options.model_fields else parser
    for option, field in options.model_fields.items() if options else ():
        arguments: dict[str, Any] = {"dest": option, "default": argparse.SUPPRESS}
        about = (field.description or "").replace("%", "%%")
        if field.annotation is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        else:
            arguments["metavar"] = fields.type_of(field).upper()
        default = "" if field.is_required() or field.default is None else f" ({field.default})"
        group.add_argument(saved.flag(option), help=f"{about}{default}", **arguments)
    if job is not None:
        saved.add_flags(parser, job, name)
    return parser


def _function(job: Job, name: str, called: str) -> Callable[..., Any]:
    if called == "complete" and job.complete is None:
        raise UsageError(f"--prompt: {name} writes no text; leave it out")
    function = job.complete if called == "complete" else job.evaluate
    if function is None:
        raise UsageError(f"{name} has nothing to evaluate: give its Job evaluate=function")
    return registry.resolve(function)


def _options(function: Callable[..., Any], name: str, reserved: Collection[str]) -> type[BaseModel]:
    """The keyword-only parameters of a job's function as a model's fields. Raises UsageError for `reserved` names."""
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [each for each in loader.signature(function).parameters.values() if each.kind is kind]
    for parameter in parameters:
        if parameter.name in reserved:
            raise UsageError(f"{name}: {saved.flag(parameter.name)} means something else; choose another name")
    with UsageError.wrap(f"{name}: the types of {function.__name__} do not determine its options"):
        # of the options alone: other parameters may name what only type checkers import
        given = {each.name: each.annotation for each in parameters if each.annotation is not each.empty}
        names = getattr(inspect.unwrap(function), "__globals__", {})
        hints = get_type_hints(SimpleNamespace(__annotations__=given), names, include_extras=True)
        described: dict[str, Any] = {
            each.name: (hints.get(each.name, str), ... if each.default is each.empty else each.default)
            for each in parameters
        }
        return create_model("Options", **described)
