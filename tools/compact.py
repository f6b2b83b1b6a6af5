"""Make records and pictures small before they are committed: python tools/compact.py FILE...

A record (.json) gets a line for each case and row instead of one for each number, and keeps seven digits of what is not whole:
a card's clock has no more to tell. In benchmarks/results it is compressed as well, as FILE.json.gz, and so is what is long in
docs/data, as FILE.gz (`zcat` shows it). A picture (.svg) loses what nobody sees; no point moves by a hundredth of its unit or
more, and none of a long curve by more than a twentieth.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ElementTree.register_namespace("", SVG)
ElementTree.register_namespace("xlink", LINK)

# a curve of so many points is written in steps of tenths
LONG = 16
# a file of docs/data with more bytes is compressed
LONG_DATA = 4000


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
    while (shorter := _pass(text)) != text:
        text = shorter
    return text


def _pass(text: str) -> str:
    root = ElementTree.fromstring(text)
    used = re.findall(r'(?:href="|url\()#([\w.-]+)', text)
    names = {name: f"n{number}" for number, name in enumerate(dict.fromkeys(used))}
    sheet = root.find(f"{{{SVG}}}defs/{{{SVG}}}style")
    rules = "" if sheet is None else re.sub(r"('DejaVu Sans'), '[^;}]*sans-serif", r"\1,Verdana,sans-serif", sheet.text or "")
    # those of a picture that was made small before
    styles = {style: name for name, style in re.findall(r"\n\.(s\d+)\{(.*)\}", rules)}
    known = len(styles)
    _shorten(root, names, styles)
    _join_lines(root, {name for style, name in styles.items() if "fill:none" in style or "fill:" not in style})
    if sheet is not None:
        sheet.text = rules.strip() + "".join(f"\n.{name}{{{style}}}" for style, name in list(styles.items())[known:])
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
    _gather(element, {name for style, name in styles.items() if re.search(r"(^|;)opacity:", style)})


# a mark at an axis
MARK = re.compile(r"M0 0([HV])(-?[\d.]+)")


def _join_lines(root: Element, outlined: set[str]) -> None:
    """Marks at an axis become lines, and lines along an axis become one path with others of their look.

    Between them there are such lines and words only, which do not cover each other.
    """
    marks = {path.get("id"): path for path in root.iter(f"{{{SVG}}}path") if MARK.fullmatch(path.get("d", ""))}
    for parent in list(root.iter()):
        for use in parent.findall(f"{{{SVG}}}use"):
            mark = marks.get(use.get(f"{{{LINK}}}href", "")[1:])
            if mark is not None and "transform" not in use.attrib and mark.get("class", "") in outlined:
                axis, length = MARK.fullmatch(mark.get("d", "")).groups()  # type: ignore[union-attr]
                line = f"M{use.get('x', '0')} {use.get('y', '0')}{axis.lower()}{length}"
                look = {key: use.get(key) or mark.get(key, "") for key in ("clip-path", "class")}
                use.tag = f"{{{SVG}}}path"
                use.attrib.clear()
                use.attrib.update({"d": line} | {key: value for key, value in look.items() if value})
    used = set(re.findall(r'(?:href="|url\()#([\w.-]+)', ElementTree.tostring(root, encoding="unicode")))
    for parent in list(root.iter()):
        for child in list(parent):
            unused = child.get("id") in marks and child.get("id") not in used
            if unused or (child.tag == f"{{{SVG}}}defs" and not len(child)):
                parent.remove(child)
        _join_children(parent, outlined)


def _join_children(parent: Element, outlined: set[str]) -> None:
    first: dict[tuple[str, str], Element] = {}
    for child in list(parent):
        line = child.tag == f"{{{SVG}}}path" and child.attrib.keys() <= {"d", "clip-path", "class"}
        if line and child.get("class", "") in outlined and _axis_lines(child.get("d", "")):
            look = child.get("clip-path", ""), child.get("class", "")
            if look in first:
                first[look].set("d", first[look].get("d", "") + child.get("d", ""))
                parent.remove(child)
            else:
                first[look] = child
        elif child.tag != f"{{{SVG}}}text":
            first = {}


def _axis_lines(path: str) -> bool:
    return re.fullmatch(r"(?:M-?[\d.]+ -?[\d.]+[HVhv]-?[\d.]+)+", path) is not None


def _gather(element: Element, translucent: set[str]) -> None:
    """Neighbours of one style and one clip become a group that says so once."""
    runs: list[list[Element]] = []
    for child in element:
        look = _look(child, translucent)
        if look and runs and look == _look(runs[-1][0], translucent):
            runs[-1].append(child)
        else:
            runs.append([child])
    for run in runs:
        if len(run) > 1:
            group = Element(f"{{{SVG}}}g", dict(_look(run[0], translucent)))
            group.tail = "\n"
            place = list(element).index(run[0])
            element[place : place + len(run)] = [group]
            for child in run:
                for key in group.attrib:
                    del child.attrib[key]
                group.extend([child] if child.attrib else list(child))


def _look(element: Element, translucent: set[str]) -> dict[str, str]:
    """What a group may say for it: nothing if others name it, if it is see-through as a whole, or if it moves its clip."""
    look = {key: element.attrib[key] for key in ("clip-path", "class") if key in element.attrib}
    named = "id" in element.attrib or look.get("class") in translucent
    return {} if named or "class" not in look or {"clip-path", "transform"} <= element.attrib.keys() else look


def _shorter(key: str, value: str, names: dict[str, str]) -> str:
    """An attribute; an empty one is left out."""
    if key == "id":
        return names.get(value, "")
    if value.startswith("data:"):
        return re.sub(r"\s", "", value)
    value = re.sub(r"#([\w.-]+)", lambda found: f"#{names.get(found[1], found[1])}", value)
    if key == "style":
        value = value.replace(": ", ":").replace("; ", ";")
        # Verdana, because text was laid out in DejaVu's widths and they are Verdana's
        value = re.sub(r"(font(?:-family)?:[^;]*'DejaVu Sans'), [^;]*sans-serif", r"\1,Verdana,sans-serif", value)
        return re.sub(r"(font(?:-family)?:[^;]*'DejaVu Sans Mono'), [^;]*monospace", r"\1,monospace", value)
    if key == "transform" and value.startswith("rotate(-0 "):
        return ""
    if key != "d":
        return re.sub(r"\d+\.\d{3,}", _rounded, value)
    value = re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip()
    if value.count("L") >= LONG and re.fullmatch(r"M[-\d. L]+", value):
        return _stepped(value)
    return _straight(re.sub(r"\d+\.\d{3,}", _rounded, value))


def _straight(path: str) -> str:
    """Lines along an axis name one coordinate only."""
    corners = re.findall(r"([ML])(-?[\d.]+) (-?[\d.]+)", path)
    if "".join(f"{kind}{x} {y}" for kind, x, y in corners) != path.rstrip("z"):
        return path
    here, words = ("", ""), []
    for kind, x, y in corners:
        along = kind == "L" and (x == here[0] or y == here[1])
        words.append(f"{kind}{x} {y}" if not along else f"V{y}" if x == here[0] else f"H{x}")
        here = x, y
    return "".join(words) + "z" * path.count("z")


def _stepped(path: str) -> str:
    """A long curve as steps of whole tenths, each from where the last one ended, so that errors do not add up."""
    words = []
    for curve in path[1:].split("M"):
        tenths = [tuple(round(10 * float(number)) for number in point.split()) for point in curve.split("L")]
        steps = [(x - left, y - above) for (left, above), (x, y) in pairwise(tenths)]
        words.append("M" + " ".join(_tenths(number) for number in tenths[0]) + "l")
        words.append(" ".join(_tenths(number) for step in steps if step != (0, 0) for number in step))
    return re.sub(r" -", "-", "".join(words))


def _tenths(number: int) -> str:
    return f"{number / 10:g}".replace("0.", ".", 1) if abs(number) < 10 else f"{number / 10:g}"


def _rounded(found: re.Match[str]) -> str:
    # scales are below 1 and stay as they are
    return found[0] if float(found[0]) < 1 else f"{float(found[0]):.2f}".rstrip("0").rstrip(".")


COMPACT: dict[str, Callable[[str], str]] = {".json": record, ".svg": picture}


def crisp(cells: Any) -> Any:
    """Cells for `imshow(interpolation="none")`, a few pixels each: a viewer that smooths what it enlarges keeps the edges."""
    return cells.numpy().repeat(4, 0).repeat(4, 1)


def compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)


def shrink(path: Path) -> Path:
    """The file that is there now."""
    text = COMPACT.get(path.suffix, str)(path.read_text())
    folders = path.resolve().parts
    long_data = folders[-3:-1] == ("docs", "data") and len(text.encode()) > LONG_DATA
    if long_data or (path.suffix == ".json" and "results" in folders[-3:]):
        kept = path.with_name(f"{path.name}.gz")
        kept.write_bytes(compressed(text))
        path.unlink()
        return kept
    path.write_text(text)
    return path


def main(paths: list[str]) -> None:
    for path in map(Path, paths):
        before = path.stat().st_size
        kept = shrink(path)
        print(f"{kept}: {before:,} -> {kept.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
