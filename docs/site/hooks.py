"""What MkDocs is told beside mkdocs.yml: pages that stand elsewhere in the repository, the API reference, and links
between them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# Pages outside of docs/, and where they stand on the site. The first is the site's front page.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "zoo/README.md": "zoo/README.md",
    "zoo/flux/README.md": "zoo/flux/README.md",
    "zoo/video/README.md": "zoo/video/README.md",
    # Its page is made by notebook_page.
    "parallel_examples/launch.ipynb": "notebook.md",
}
# How the search weighs pages. The history names everything, so it would be found for every word. A question is what a
# reader types.
SEARCH = {"CHANGELOG.md": {"exclude": True}, "questions.md": {"boost": 2}}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)]*)?\)")
# Of each, the file that imports the public names.
# "para_core" also has the names of the launcher, which para_core/__init__.py imports without torch.
PACKAGES = {"para_core": "para_core/api.py", "para_core.adapters": "adapters/api.py"}
INSTALLED = ROOT / "build/site_source/para_core"
# Stands in a docstring for the options that para_core/declared_options.py describes.
OPTIONS = "        {options}\n"


def on_startup(command: str, dirty: bool) -> None:
    """Show the API's reader the shape that installing gives: adapters/ and kernels/ as parts of para_core."""
    # Copies: the reader does not look for modules behind links.
    shutil.rmtree(INSTALLED, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "para_core", INSTALLED, ignore=ignored)
    for folder in ("adapters", "kernels"):
        shutil.copytree(ROOT / folder, INSTALLED / folder, ignore=ignored)
    for path in INSTALLED.rglob("*.py"):
        source = path.read_text()
        if OPTIONS in source:
            path.write_text(
                with_options(source, ".".join(path.relative_to(INSTALLED.parent).with_suffix("").parts))
            )


def with_options(source: str, module: str) -> str:
    """Return the source of a module with the options that functions and classes declare, which the API's reader cannot
    import: in their docstrings, and in the signatures of functions.
    """
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        docstring = ast.get_docstring(node, clean=False) or ""
        if OPTIONS not in docstring:
            continue
        documented = getattr(importlib.import_module(module), node.name)
        source = source.replace(docstring, documented.__doc__)
        if isinstance(node, ast.FunctionDef):
            decorators = "".join(f"@{ast.unparse(decorator)}\n" for decorator in node.decorator_list)
            header = f"def {node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}:"
            source = source.replace(decorators + header, f"def {node.name}{inspect.signature(documented)}:")
    return source


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that stand elsewhere, and one for each package's API."""
    for source, page in ELSEWHERE.items():
        if source.endswith(".ipynb"):
            continue
        files.append(
            File.generated(config, page, content=moved((ROOT / source).read_text(), Path(source).parent))
        )
    files.append(
        File.generated(config, "notebook.md", content=notebook_page(ROOT / "parallel_examples/launch.ipynb"))
    )
    for package, file in PACKAGES.items():
        files.append(File.generated(config, f"api/{package}.md", content=reference(package, file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the page with links as the site has them, and set how the search weighs it."""
    if page.file.src_uri in SEARCH:
        page.meta["search"] = SEARCH[page.file.src_uri]
    return markdown if page.file.generated_by else moved(markdown, Path("docs", page.file.src_uri).parent)


def moved(markdown: str, folder: Path) -> str:
    """``markdown``, which stands in ``folder`` of the repository, with its links as the site has them.

    A link to a file that is no page becomes its text.
    """

    def link(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        path = (ROOT / folder / target).resolve().relative_to(ROOT)
        page = ELSEWHERE.get(str(path), str(path.relative_to("docs")) if path.parts[0] == "docs" else None)
        if page is None:
            return f"{text}"
        # docs/ is the top of the site. Other folders keep their path from the top of the repository.
        on_site = folder.relative_to("docs") if folder.parts[:1] == ("docs",) else folder
        return f"{image}[{text}]({'../' * len(on_site.parts)}{page}{anchor or ''})"

    return LINK.sub(link, markdown)


def notebook_page(path: Path) -> str:
    """Return a page with the cells of a notebook, and the outputs that are stored in it."""
    blocks = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        blocks.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        blocks += [output_block(output) for output in cell.get("outputs", [])]
    return "\n\n".join(blocks) + "\n"


def output_block(output: dict[str, Any]) -> str:
    """Return an output of a notebook's cell in Markdown: an image, or its text."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output](data:image/png;base64,{data['image/png'].strip()})"
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.strip()}\n```"


def reference(package: str, file: str) -> str:
    """Return a page with every name that ``file`` imports."""
    imports = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.ImportFrom)]
    names = sorted(alias.name for node in imports for alias in node.names)
    if package == "para_core":
        names = ["launch", "launcher.handle.Launched", "Cancelled", "RankDied", *names]
    return "\n\n".join([f"# {package}", *(f"::: {package}.{name}" for name in names)]) + "\n"
