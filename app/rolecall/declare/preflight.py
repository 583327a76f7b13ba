"""What the text of a user's file tells of calls, which may be made late in a run: calls of what is no remote method, or
with arguments that it does not take. It says nothing if it cannot be certain. What a worker meets before its first
step is left to it.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rolecall.declare import loader, sources
from rolecall.declare.remote import require_remote
from rolecall.declare.spec import Job
from rolecall.errors import UsageError

# Context's methods that call a peer's, and which argument names that
CALLS = {"call": 1, "call_each": 0, "call_all": 0, "call_any": 0}
NO_METHOD = "is no method of a role's class: put it into the class, and @remote above it"
Function = ast.FunctionDef | ast.AsyncFunctionDef
UNKNOWN = object()


def require_sound(job: Job, module: ModuleType) -> None:
    """Raises UsageError, with file and line, for the first of these in `module`, which declares `job`, and in the
    modules of its roles' functions."""
    places = [module.__name__, *(getattr(role.run, "__module__", "") for role in job.roles)]
    roles = {role.run.__qualname__ for role in job.roles if isinstance(role.run, FunctionType)}
    for name in dict.fromkeys(places):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and loader.is_users(file) and file.endswith(".py"):
            tree = ast.parse(sources.content(Path(file)))
            for function, context in _with_context(tree, roles):
                _Body(job, function, context, sys.modules[name], tree).check()


def _with_context(tree: ast.Module, roles: set[str]) -> Iterator[tuple[Function, str]]:
    """The functions, and what they call the Context that they take; nothing if they take none."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            taken = [each.arg for each in arguments if each.annotation and _names_context(each.annotation)]
            if taken or (arguments and node.name in roles and node in tree.body):
                yield node, taken[0] if taken else arguments[0].arg
            else:
                yield node, ""


def _names_context(annotation: ast.expr) -> bool:
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return str(text).partition("[")[0].rpartition(".")[2] == "Context"


class _Body:
    """One function, and what it calls the Context that it takes, if it takes one."""

    def __init__(self, job: Job, function: Function, context: str, module: ModuleType, tree: ast.Module) -> None:
        self.function, self.context, self.module = function, context, module
        self.bound = defaultdict[str, list[ast.AST | None]](list)  # a name in this function, to what may be in it
        inner = {
            node
            for scope in ast.walk(function)
            if isinstance(scope, Function | ast.Lambda | ast.ClassDef) and scope is not function
            for node in ast.walk(scope)
            if node is not scope
        }  # whose names are others than this function's
        for node in ast.walk(function):
            if node in inner:
                continue
            if isinstance(node, Function) and node is not function and not node.decorator_list:
                self.bound[node.name].append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1:
                self.bound[node.targets[0].id].append(node.value)
        stores = Counter(name for node in ast.walk(function) for name in _stored(node))
        for name, count in stores.items():
            if count > len(self.bound[name]):
                self.bound[name].append(None)  # something else
        kinds = [kind for role in job.roles if isinstance(kind := role.run, type)]
        self.classes = {base for kind in kinds for base in kind.__mro__ if base is not object}  # of roles
        self.changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}

    def check(self) -> None:
        """Raises UsageError."""
        for node in ast.walk(self.function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            of_context = isinstance(node.func.value, ast.Name) and node.func.value.id == self.context
            at = CALLS.get(node.func.attr)
            if at is not None and len(node.args) > at:
                self._check_call(node, node.args[at], at + 1, of_context)

    def _refuse(self, at: ast.AST, problem: str) -> None:
        path = loader.shown(Path(str(self.module.__file__)))
        raise UsageError(f"{path}:{getattr(at, 'lineno', 0)}: {problem}")

    def _check_call(self, call: ast.Call, given: ast.expr, at: int, of_context: bool) -> None:
        """A call of a method that is named by the class of a role; `at` is where its arguments begin. What is called by
        another object than the Context that this function takes may be something else."""
        node = self._known(given)
        if not of_context and not (isinstance(node, ast.Attribute) and self._is_role_class(node.value)):
            return
        if isinstance(node, ast.Lambda | Function):
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            self._refuse(given, f"{name} {NO_METHOD}")
        if not isinstance(node, ast.Attribute) or not isinstance(kind := self._value(node.value), type):
            if inspect.isfunction(function := self._value(node)):
                self._refuse(given, f"{function.__qualname__} {NO_METHOD}")
            return
        method = inspect.getattr_static(kind, node.attr, None)
        if not inspect.isfunction(method):
            if isinstance(kind.__getattribute__, FunctionType) or method is not None:
                return
            self._refuse(given, f"{kind.__name__} has no method {node.attr!r}")
        try:
            require_remote(method)
            self._check_arguments(call, method, at)
        except UsageError as error:
            self._refuse(given, str(error))

    def _is_role_class(self, node: ast.expr) -> bool:
        value = self._value(node)
        return isinstance(value, type) and value in self.classes

    def _check_arguments(self, call: ast.Call, method: FunctionType, at: int) -> None:
        """Raises UsageError if `method` cannot take the arguments of `call` after the first `at`."""
        if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
            return  # how many there are is not known
        signature = loader.signature(method)
        try:
            signature.bind(None, *call.args[at:], **{str(each.arg): each.value for each in call.keywords})
        except TypeError as error:
            raise UsageError(f"{method.__qualname__}{signature}: {error}") from None

    def _known(self, node: ast.AST | None) -> ast.AST | None:
        """What `node` is; of a local name, what it was bound to, or None if that may be several things."""
        if isinstance(node, ast.Name) and node.id in self.bound:
            return self.bound[node.id][0] if len(self.bound[node.id]) == 1 else None
        return node

    def _value(self, node: ast.AST | None) -> Any:
        """The value of the module's name, or of a name in a module that it has imported; UNKNOWN for anything else."""
        if isinstance(node, ast.Name) and node.id not in self.bound and node.id not in self.changed:
            return vars(self.module).get(node.id, UNKNOWN)
        if isinstance(node, ast.Attribute) and isinstance(home := self._value(node.value), ModuleType):
            return getattr(home, node.attr, UNKNOWN)
        return UNKNOWN


def _stored(node: ast.AST) -> list[str]:
    """The names that a node binds."""
    if isinstance(node, ast.Name):
        return [] if isinstance(node.ctx, ast.Load) else [node.id]
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in node.names]
    return [node.name] if isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name else []
