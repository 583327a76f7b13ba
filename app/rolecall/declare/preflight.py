"""What the text of a user's file tells before anything starts: functions that no peer could import, values that no
checkpoint could hold, roles that the job does not have. It says nothing if it cannot be certain; the worker says
the rest.
"""

from __future__ import annotations

import ast
import inspect
import sys
from abc import ABCMeta
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from rolecall.declare import loader, plain, sources
from rolecall.declare.remote import METHOD, NOT_IMPORTABLE, NOT_SERVED, is_in_turn, require_importable
from rolecall.declare.spec import Job
from rolecall.errors import UsageError

NOT_RESTORED = (
    "steps() would begin at step 1 again after each restart: write `state = context.restore({...})` before the loop, "
    "with what it changes, or `context.restore({})` if it changes nothing"
)
CALLS = ("call", "call_each", "call_all")  # methods of Context whose second argument is a function
OF_ROLES = ("call_each", "call_all")  # which raise if their first argument is no role
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
    """The functions that take a Context, and what they call it."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            taken = [each.arg for each in arguments if each.annotation and _names_context(each.annotation)]
            if taken or (arguments and node.name in roles and node in tree.body):
                yield node, taken[0] if taken else arguments[0].arg


def _names_context(annotation: ast.expr) -> bool:
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return str(text).partition("[")[0].rpartition(".")[2] == "Context"


class _Body:
    """One function that takes a Context."""

    def __init__(self, job: Job, function: Function, context: str, module: ModuleType, tree: ast.Module) -> None:
        self.job, self.function, self.context, self.module = job, function, context, module
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
        self.changed = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}

    def check(self) -> None:
        """Raises UsageError."""
        self._check_steps()
        for node in ast.walk(self.function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if not isinstance(node.func.value, ast.Name) or node.func.value.id != self.context:
                continue
            if node.func.attr in CALLS:
                self._check_call(_argument(node, 1, "function"))
                self._check_turn(node)
            if node.func.attr in OF_ROLES and isinstance(role := _argument(node, 0, "role"), ast.Constant):
                self._check_role(role)
            if node.func.attr == "restore" and isinstance(state := _argument(node, 0, "state"), ast.Dict):
                for key, value in zip(state.keys, state.values, strict=True):
                    self._check_value(ast.unparse(key).strip("'\"") if key else "", value)

    def _refuse(self, at: ast.AST, problem: str) -> None:
        path = loader.shown(Path(str(self.module.__file__)))
        raise UsageError(f"{path}:{getattr(at, 'lineno', 0)}: {problem}")

    def _check_role(self, given: ast.Constant) -> None:
        jobs = [self.job, *(value for value in vars(self.module).values() if isinstance(value, Job))]
        if given.value not in {role.name for job in jobs for role in job.roles}:  # a file may have several jobs
            self._refuse(given, self.job.no_role(str(given.value)))

    def _check_steps(self) -> None:
        """Rank 0's loop, if nothing but this function could have restored the state that it continues."""
        run = self.job.roles[0].run
        if not isinstance(run, FunctionType) or run.__module__ != self.module.__name__:
            return
        if (run.__name__, run.__code__.co_firstlineno) != (self.function.name, self.function.lineno):
            return
        nodes = list(ast.walk(self.function))
        names = [node for node in nodes if isinstance(node, ast.Name) and node.id == self.context]
        used = [node for node in nodes if isinstance(node, ast.Attribute) and node.value in names]
        steps = [node for node in used if node.attr == "steps"]
        if steps and len(used) == len(names) and not {"restore", "snapshot"} & {node.attr for node in used}:
            self._refuse(steps[0], NOT_RESTORED)

    def _check_call(self, given: ast.expr | None) -> None:
        node = self._known(given)
        if isinstance(node, ast.Lambda | Function):
            name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
            self._refuse(given or node, f"{name} {NOT_IMPORTABLE}")
        if isinstance(node, ast.Attribute) and inspect.isroutine(method := self._method(node)):
            self._refuse(given or node, f"{method.__qualname__} {METHOD}")
        value = self._value(node)
        if inspect.isroutine(value) or inspect.isclass(value):
            try:
                require_importable(value)
            except UsageError as error:
                self._refuse(given or self.function, str(error))

    def _method(self, node: ast.Attribute) -> Any:
        """What the class of an object has for its attribute; UNKNOWN for those of modules, of classes, and its own."""
        home = self._known(node.value)
        kind = self._value(home.func) if isinstance(home, ast.Call) else type(owner := self._value(home))
        if not isinstance(kind, type) or issubclass(kind, type | ModuleType) or isinstance(kind.__new__, FunctionType):
            return UNKNOWN
        method = inspect.getattr_static(kind, node.attr, UNKNOWN)
        if isinstance(method, staticmethod | classmethod):
            return UNKNOWN
        of_class = isinstance(home, ast.Call) or inspect.getattr_static(owner, node.attr, UNKNOWN) is method
        return method if of_class else UNKNOWN

    def _check_turn(self, call: ast.Call) -> None:
        """Rank 0 is the first role's member 0, and serves no calls in turn."""
        function, to = self._value(_argument(call, 1, "function")), call.args[0] if call.args else None
        if not is_in_turn(function) or not isinstance(to, ast.Constant):
            return
        jobs = [self.job, *(value for value in vars(self.module).values() if isinstance(value, Job))]
        firsts = {job.roles[0].name for job in jobs}  # a file may have several jobs
        if len(firsts) == 1 and to.value in {name for first in firsts for name in (first, f"{first}_0")}:
            self._refuse(call, f"{function.__name__} {NOT_SERVED}")

    def _check_value(self, name: str, given: ast.expr) -> None:
        node = self._known(given)
        if isinstance(node, ast.Lambda | Function):
            self._refuse(given, plain.refusal(name, FunctionType))
        if isinstance(node, ast.Call):
            kind = self._value(node.func)
            if isinstance(kind, type) and _is_plainly_refused(kind):
                self._refuse(given, plain.refusal(name, kind))
        value = self._value(node)
        if value is not UNKNOWN and not plain.is_stateful(value) and plain.is_refused(type(value)):
            self._refuse(given, plain.refusal(name, type(value)))

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


def _argument(call: ast.Call, position: int, keyword: str) -> ast.expr | None:
    if any(isinstance(each, ast.Starred) for each in call.args[: position + 1]):
        return None
    named = {each.arg: each.value for each in call.keywords}
    return call.args[position] if len(call.args) > position else named.get(keyword)


def _is_plainly_refused(kind: type) -> bool:
    """Whether no instance of `kind` can be saved; False if an instance may have methods that the class lacks."""
    if all(callable(getattr(kind, name, None)) for name in plain.STATEFUL) or not plain.is_refused(kind):
        return False
    if type(kind) not in (type, ABCMeta) or isinstance(kind.__new__, FunctionType):
        return False
    members = (item for base in kind.__mro__ for item in vars(base).items())
    methods = {name: each for name, each in members if isinstance(each, FunctionType)}
    stores = any("state_dict" in method.__code__.co_names for method in methods.values())
    return not stores and not {"__getattr__", "__getattribute__"} & set(methods)
