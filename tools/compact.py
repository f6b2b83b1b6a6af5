"""Make records and pictures small before they are committed: python tools/compact.py FILE...

A record (.json) gets a line for each case and row instead of one for each number, and keeps seven digits of what is not whole:
a card's clock has no more to tell; in benchmarks/results it is compressed as well, as FILE.json.gz. A picture (.svg) loses what
nobody sees; no point moves by a hundredth of its unit or more.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", LINK)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _lines(value: Any) -> str:
    """Lists of objects with a line for each of them, anything else on one line."""
    if isinstance(value, list) and value and all(isinstance(member, dict) for member in value):
        return "[\n" + ",\n".join(_line(member) for member in value) + "\n]"
    return _line(value)


def _seven_digits(number: str) -> float:
    return float(f"{float(number):.7g}")


def record(text: str) -> str:
    data = json.loads(text, parse_float=_seven_digits)
    return "{\n" + ",\n".join(f"{_line(name)}:{_lines(value)}" for name, value in data.items()) + "\n}\n"


def picture(text: str) -> str:
    """Matplotlib's drawing without its description, empty groups and long names, and with each style written once."""
    root = ElementTree.fromstring(text)
    used = re.findall(r'(?:href="|url\()#([\w.-]+)', text)
    names = {name: f"n{number}" for number, name in enumerate(dict.fromkeys(used))}
    styles: dict[str, str] = {}
    _shorten(root, names, styles)
    sheet = root.find(f"{{{SVG}}}defs/{{{SVG}}}style")
    if sheet is not None:
        sheet.text = (sheet.text or "") + "".join(f"\n.{name}{{{style}}}" for style, name in styles.items())
    return ElementTree.tostring(root, encoding="unicode").replace(" />", "/>").strip() + "\n"


def _shorten(element: Element, names: dict[str, str], styles: dict[str, str]) -> None:
    element.text, element.tail = (element.text or "").strip(), "\n"
    attributes = {key: _shorter(key, value, names) for key, value in element.attrib.items()}
    moved = re.fullmatch(r"translate\(([-\d.]+) ([-\d.]+)\)", attributes.get("transform", ""))
    if element.tag == f"{{{SVG}}}use" and moved and not {"x", "y"} & attributes.keys():
        # what x and y of a `use` mean
        attributes |= {
            "transform": "",
            **{key: "" if value == "0" else value for key, value in zip("xy", moved.groups(), strict=True)},
        }
    if (style := attributes.pop("style", None)) is not None:
        attributes["class"] = styles.setdefault(style, f"s{len(styles)}")
    element.attrib.clear()
    element.attrib.update({key: value for key, value in attributes.items() if value})
    for child in list(element):
        if child.tag == f"{{{SVG}}}metadata":
            element.remove(child)
            continue
        _shorten(child, names, styles)
        if child.tag == f"{{{SVG}}}g" and not child.attrib:
            place = list(element).index(child)
            element[place : place + 1] = list(child)


def _shorter(key: str, value: str, names: dict[str, str]) -> str:
    """An attribute; an empty one is left out."""
    if key == "id":
        return names.get(value, "")
    if value.startswith("data:"):
        return re.sub(r"\s", "", value)
    value = re.sub(r"#([\w.-]+)", lambda found: f"#{names.get(found[1], found[1])}", value)
    if key == "style":
        return value.replace(": ", ":").replace("; ", ";")
    if key == "d":
        value = re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip()
    return re.sub(r"\d+\.\d{3,}", _rounded, value)


def _rounded(found: re.Match[str]) -> str:
    # scales are below 1 and stay as they are
    return found[0] if float(found[0]) < 1 else f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


COMPACT: dict[str, Callable[[str], str]] = {".json": record, ".svg": picture}


def shrink(path: Path) -> Path:
    """The file that is there now."""
    text = COMPACT[path.suffix](path.read_text())
    if path.suffix != ".json" or "results" not in path.parent.parts[-2:]:
        path.write_text(text)
        return path
    kept = path.with_name(f"{path.name}.gz")
    kept.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    path.unlink()
    return kept


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        before = path.stat().st_size
        kept = shrink(path)
        print(f"{kept}: {before:,} -> {kept.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
