"""What the text of a user's file tells of calls, which may be made late in a run: a call of a method of a role's class
that is not remote, is not there, or does not take the arguments, or of a function that is no method. It says nothing if
it cannot be certain.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType, ModuleType

from rolecall.declare import loader, sources
from rolecall.declare.remote import remote_of, require_remote
from rolecall.declare.spec import Job
from rolecall.errors import UsageError, did_you_mean

# Context's methods that call a peer's, and which argument names that
CALLS = {"call": 1, "call_each": 0, "call_all": 0, "call_any": 0}


def require_sound(job: Job, module: ModuleType) -> None:
    """Raises UsageError, with file and line, for the first such call in `module`, which declares `job`, and in the
    modules of its roles' functions."""
    kinds = {base for role in job.roles if isinstance(role.run, type) for base in role.run.__mro__[:-1]}
    places = [module.__name__, *(getattr(role.run, "__module__", "") for role in job.roles)]
    for name in dict.fromkeys(places):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and loader.is_users(file) and file.endswith(".py"):
            _check(ast.parse(sources.content(Path(file))), sys.modules[name], kinds)


def _check(tree: ast.Module, module: ModuleType, kinds: set[type]) -> None:
    bound = Counter(name for node in ast.walk(tree) for name in _bound(node))
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        at = CALLS.get(call.func.attr, len(call.args))
        match call.args[at : at + 1]:
            case [ast.Lambda() | ast.Name() as given] if _is_context(call.func.value):
                name = given.id if isinstance(given, ast.Name) else "<lambda>"
                value = vars(module).get(name)
                is_function = isinstance(value, FunctionType) and remote_of(value) is None and bound[name] == 1
                if isinstance(given, ast.Lambda) or is_function:
                    raise _at(module, given, f"{name} is no method of a role's class")
            case [ast.Attribute(ast.Name(name), method)] if bound[name] == 1:  # elsewhere it could be something else
                kind = vars(module).get(name)
                if isinstance(kind, type) and kind in kinds:
                    try:
                        _check_call(call, kind, method, at + 1)
                    except UsageError as error:
                        raise _at(module, call.args[at], error) from None


def _at(module: ModuleType, node: ast.expr, problem: object) -> UsageError:
    return UsageError(f"{loader.shown(Path(str(module.__file__)))}:{node.lineno}: {problem}")


def _is_context(value: ast.expr) -> bool:
    """Whether `value` is called a context, perhaps with options."""
    match value:
        case ast.Name("context") | ast.Attribute(attr="context"):
            return True
        case ast.Call(ast.Attribute(inner, "options")):
            return _is_context(inner)
    return False


def _check_call(call: ast.Call, kind: type, name: str, at: int) -> None:
    """Raises UsageError if the method `name` of `kind` is none that takes the arguments of `call` from `at` on."""
    method = inspect.getattr_static(kind, name, None)
    if not inspect.isfunction(method):
        if isinstance(kind.__getattribute__, FunctionType) or method is not None:
            return
        raise UsageError(f"{kind.__name__} has no method {name!r}{did_you_mean(name, _remote_names(kind))}")
    require_remote(method)
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return  # how many there are is not known
    signature = loader.signature(method)
    names = {each.name for each in signature.parameters.values() if each.kind != each.VAR_POSITIONAL}
    takes_any = any(each.kind == each.VAR_KEYWORD for each in signature.parameters.values())
    for keyword in call.keywords:
        if keyword.arg not in names and not takes_any:
            meant = did_you_mean(str(keyword.arg), names)
            raise UsageError(
                f"{method.__qualname__}{signature}: got an unexpected keyword argument {keyword.arg!r}{meant}"
            )
    try:
        signature.bind(None, *call.args[at:], **{str(each.arg): each.value for each in call.keywords})
    except TypeError as error:
        raise UsageError(f"{method.__qualname__}{signature}: {error}") from None


def _remote_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if remote_of(inspect.getattr_static(kind, name)) is not None]


def _bound(node: ast.AST) -> list[str]:
    """The names that a node binds."""
    match node:
        case ast.Name(name, ast.Store() | ast.Del()) | ast.arg(name):
            return [name]
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return [name]
        case ast.Import(aliases) | ast.ImportFrom(names=aliases):
            return [(alias.asname or alias.name).partition(".")[0] for alias in aliases]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
    return []
