"""The house's rules: imports run one way, hosts stay in their own folder, files stay short."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOSTS = {"ultralytics", "transformers", "accelerate", "datasets", "easyocr", "lightning"}
# What a plug's host is made of: the folder's name is the plug's.
OWN = {
    "ultralytics": {"ultralytics"},
    "huggingface": {"transformers", "accelerate", "datasets"},
    "easyocr": {"easyocr", "datasets"},
    "lightning": {"lightning"},
}
FOLDER_OF_PLUG = {"yolo": "ultralytics", "hf": "huggingface", "easyocr": "easyocr", "lightning": "lightning"}
LONGEST = 300  # lines
SOURCES = sorted(p for room in ("plugins", "integrations") for p in (ROOT / room).rglob("*.py"))
BESIDE = sorted(p for room in ("tests", "examples", "benchmarks") for p in (ROOT / room).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any depth of it; names of `from a import b` as `a.b` too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield str(node.args[0].value)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imported(path)}


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_rules_see_imports_of_every_form(tmp_path: Path) -> None:
    global ROOT
    root, ROOT = ROOT, tmp_path
    try:
        folder = tmp_path / "plugins" / "core"
        folder.mkdir(parents=True)
        (folder / "x.py").write_text(
            "import a.b as c\nfrom d import e\nfrom . import f\nfrom ..g import h\n"
            "def late():\n    import i\n    import importlib\n    importlib.import_module('j.k')\n    __import__('l')\n"
        )
        found = set(imported(folder / "x.py"))
    finally:
        ROOT = root
    assert {"a.b", "d.e", "plugins.core.f", "plugins.g.h", "i", "j.k", "l"} <= found


def test_there_is_something_to_check() -> None:
    assert {"plugins", "integrations"} <= {p.relative_to(ROOT).parts[0] for p in SOURCES}
    assert len(SOURCES) > 15
    assert {"tests", "examples"} <= {p.relative_to(ROOT).parts[0] for p in BESIDE}  # benchmarks: a checkout alone


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "integrations")], ids=ids)
def test_integrations_import_no_plug_and_no_other_host(path: Path) -> None:
    assert "plugins" not in tops(path)
    parts = path.relative_to(ROOT / "integrations").parts
    own = OWN.get(parts[0], set())
    assert tops(path) & HOSTS <= own
    rooms = {n.split(".")[1] for n in imported(path) if n.startswith("integrations.")}
    others = set(OWN) - ({parts[0]} if len(parts) > 1 else set())
    assert not rooms & others


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "plugins" / "core")], ids=ids)
def test_the_core_imports_no_host_and_no_integration(path: Path) -> None:
    assert not tops(path) & (HOSTS | {"integrations"})
    plugs = {f"plugins.{name}" for name in (*FOLDER_OF_PLUG, "loop", "cli")}
    assert not {n for n in imported(path) if n in plugs or n.startswith(tuple(f"{p}." for p in plugs))}


def plug_of(path: Path) -> str:
    """The plug that a file of `plugins` is, or is a part of: the name right below that folder."""
    return path.relative_to(ROOT / "plugins").with_suffix("").parts[0]


PLUGS = [p for p in SOURCES if p.is_relative_to(ROOT / "plugins") and not p.is_relative_to(ROOT / "plugins" / "core")]


def test_a_plug_may_be_a_folder() -> None:
    assert set(FOLDER_OF_PLUG) <= {plug_of(path) for path in PLUGS}
    assert plug_of(ROOT / "plugins" / "easyocr" / "training.py") == "easyocr"


@pytest.mark.parametrize("path", PLUGS, ids=ids)
def test_a_plug_holds_no_host_and_takes_its_own_integration_only(path: Path) -> None:
    own = FOLDER_OF_PLUG.get(plug_of(path))
    allowed = {"huggingface": {"transformers"}, "lightning": {"lightning"}}.get(
        own, set()
    )  # a callback is a subclass of the host's own
    assert tops(path) & HOSTS <= allowed
    rooms = {n.split(".")[1] for n in imported(path) if n.startswith("integrations.")} & set(OWN)
    if plug_of(path) not in ("cli",):
        assert rooms <= {own}


@pytest.mark.parametrize("path", [*SOURCES, *BESIDE], ids=ids)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


LOADED = """
import sys
{statement}
print(",".join(sorted({{name.partition(".")[0] for name in sys.modules}} & {{{names}}})))
"""


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import plugins; plugins.__version__", HOSTS | {"torch", "integrations", "pydantic"}),
        ("from plugins import AccelConfig; AccelConfig()", HOSTS | {"torch", "integrations", "psutil"}),
        ("import plugins.yolo; plugins.yolo.callbacks", HOSTS | {"torch"}),
        ("import plugins.core.session", HOSTS | {"integrations"}),
        ("import integrations.contract, integrations.patches", HOSTS | {"plugins"}),
    ],
)
def test_what_an_import_loads(statement: str, forbidden: set[str], tmp_path: Path) -> None:
    code = LOADED.format(statement=statement, names=", ".join(repr(name) for name in sorted(forbidden)))
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert done.stdout.strip() == ""


CORE = ROOT / "plugins" / "core"


def in_circles(arrows: dict[str, set[str]]) -> list[str]:
    """Nodes that lie on a circle, or between two."""
    left = {name: to - {name} for name, to in arrows.items()}
    while free := [name for name, to in left.items() if not to & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_circles_are_seen() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == ["a", "b", "c"]


def test_no_circles_among_the_files() -> None:
    """Imports for type checking count as well."""
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in SOURCES}
    files = {".".join(parts).removesuffix(".__init__"): path for path, parts in names.items()}
    arrows = {name: set(imported(path)) & files.keys() for name, path in files.items()}
    for to in arrows.values():  # `from a import b` is of the file a/b.py, where there is one, and not of a
        to -= {name.rpartition(".")[0] for name in to}
    assert in_circles(arrows) == []


def test_no_circles_among_the_folders_of_the_core() -> None:
    arrows: dict[str, set[str]] = {folder.name: set() for folder in CORE.iterdir() if folder.is_dir()}
    for path in CORE.rglob("*/*.py"):
        arrows.setdefault(path.relative_to(CORE).parts[0], set()).update(
            name.split(".")[2] for name in imported(path) if name.startswith("plugins.core.") and name.count(".") > 1
        )
    assert in_circles({name: to & arrows.keys() for name, to in arrows.items()}) == []


def test_the_core_is_a_few_folders_around_a_session() -> None:
    assert len({path.relative_to(CORE).parts[0] for path in CORE.rglob("*/*.py")}) <= 6
    assert len(list(CORE.glob("*.py"))) <= 3
