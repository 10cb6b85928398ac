#!/usr/bin/env python3
"""Keeps the pages true to the code.

    python3 docs/book.py                                     fills in every excerpt that is not what its file says
    python3 docs/book.py --check --flashsteps build/flashsteps
                                                             writes nothing; a line for each fault, exit code 1 if any
    python3 docs/book.py --site FILE                         what the site needs to know of the code, as JSON

In a page, a line of its own names a region of a source file:

    <!-- excerpt steps/05_kernel_fusion/forward.cu: // Online softmax -->    shows it, in the code block that follows
    <!-- see steps/05_kernel_fusion/forward.cu: // Online softmax -->        shows nothing here; the site turns to it

(exercise.py has <!-- hole … --> and <!-- answer … -->, ideas.py <!-- without … -->: code in the place of a region. The
site turns to what an idea takes out as it does for `see`.)

The source has no marks for this. A region begins with the only line that contains the text, and ends before the first
blank line at which every brace that it opened is closed again: with the paragraph, or with the function or loop. With
`text … other text` it ends with the first line from there on that contains the other text, and lines that do nothing
but close what it opened.

--check also follows the links and anchors of the pages, and looks up what they name in backticks and commands: steps,
files, functions and variables of the code and, given the program, its subcommands and options.
"""
import argparse
import difflib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

FIRST_COPY = 20  # steps/20_mine and so on are the reader's own copies of a chapter
DIRECTIVE = re.compile(r"^(?P<indent> *)<!-- (?P<kind>excerpt|see|without)(?: \w+ of \S+,)? (?P<file>\S+?): (?P<region>.+?) -->\n", re.MULTILINE)
BLOCK = re.compile(r"(?P<indent> *)```(?:cuda|cpp)\n(?:.*\n)*?(?P=indent)```(?:\n|\Z)")
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
ROOT = Path(__file__).resolve().parent.parent
SOURCE = r"cu|cuh|h|cpp|py|csv|txt|md|svg|cmake"


class Fault(Exception):
    """What is wrong, in one line."""


# ---- Regions of source files


def region_lines(text, region):
    """First and last line of a region, from 0, both inclusive."""
    lines = text.split("\n")
    first_text, _, last_text = region.partition(" … ")
    at = [n for n, line in enumerate(lines) if first_text in line]
    if len(at) != 1:
        raise Fault(f"'{first_text}' is in {'lines ' + ', '.join(str(n + 1) for n in at) if at else 'no line'} of it")
    depth, last_seen = 0, not last_text
    for n in range(at[0], len(lines)):
        code = lines[n].split("//")[0]
        after = depth + code.count("{") - code.count("}")
        if not last_seen:
            last_seen = last_text in lines[n]
        elif last_text and (depth <= 0 or not re.fullmatch(r"\s*}[;)]*", code.rstrip())):
            return at[0], n - 1
        elif depth <= 0 and (not lines[n].strip() or after < 0):
            return at[0], n - 1
        depth = after
    raise Fault(f"'{last_text}' is in no line of it from line {at[0] + 1} on" if not last_seen else "it does not end before the file does")


def excerpt(text, first, last):
    """The lines, moved to the left as far as they go. Lines of the preprocessor stand at the margin anyhow."""
    lines = text.split("\n")[first : last + 1]
    margin = min(len(line) - len(line.lstrip()) for line in lines if line.strip() and not line.startswith("#"))
    return "\n".join(line if line.startswith("#") else line[margin:] for line in lines)


# ---- The pages


def without(pattern, text):
    """The text with spaces in the place of what matches, so that places in it stay what they are."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def slug(heading):
    """A heading's anchor, as GitHub makes it."""
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


class Page:
    def __init__(self, path):
        self.path = path
        self.text = path.read_text(encoding="utf-8")
        self.number = path.stem[:2] if re.match(r"\d\d[_.]", path.stem) else None  # of the chapter, if it belongs to one
        self.prose = without(FENCE, self.text)
        self.code = "".join(block["text"] for block in FENCE.finditer(self.text))

    def line(self, offset):
        return self.text.count("\n", 0, offset) + 1

    def anchors(self):
        seen, anchors = {}, set()
        for heading in re.findall(r"^#{1,6} +(.+)$", self.prose, re.MULTILINE):
            anchor = slug(heading)
            anchors.add(f"{anchor}-{seen[anchor]}" if anchor in seen else anchor)
            seen[anchor] = seen.get(anchor, 0) + 1
        return anchors

    def code_spans(self):
        """(offset, text) of what stands between backticks; a line break in it is a space."""
        for match in re.finditer(r"(?<!`)`((?:[^`\n]|\n(?! *\n))+)`(?!`)", self.prose):
            yield match.start(), re.sub(r"\s+", " ", match[1]).strip()

    def shell_lines(self):
        """(offset, text) of the lines of code blocks that are to be typed."""
        for block in FENCE.finditer(self.text):
            if block["language"] in ("", "sh", "bash"):
                offset = block.start("text")
                for line in block["text"].splitlines(keepends=True):
                    yield offset, line.strip()
                    offset += len(line)


class Book:
    def __init__(self, root):
        self.root = root
        docs = root / "docs"
        pages = [root / "README.md"]
        for folder in (docs, docs / "exercises", docs / "answers"):
            pages += sorted(folder.glob("*.md"))
        self.pages = [Page(path) for path in pages if path.is_file()]
        self.chapters = {path.name[:2]: path.name for path in root.glob("steps/[0-9][0-9]_*")}
        kernels = [path for path in sorted(root.glob("steps/[0-9][0-9]_*/*.c*"))
                   if re.search(r"^const Registration step\b", path.read_text(encoding="utf-8"), re.MULTILINE)]
        self.steps = {f"{path.parent.name}/{path.stem}": path for path in kernels}
        folders = [root / "steps", root / "tests", root / "reference_cpu", docs / "results", docs / "exercises"]
        files = [path for folder in folders for path in folder.rglob("*")]
        self.names = {path.name for path in [*files, *docs.glob("*")]}
        self.words = {word for path in files if re.search(rf"\.({SOURCE})$", path.name) and path.is_file()
                      for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
        self.faults = []

    def fault(self, page, offset, what):
        self.faults.append(f"{page.path.relative_to(self.root)}:{page.line(offset)}: {what}")

    # -- Excerpts

    def region_of(self, directive):
        """Text of the file, first and last line."""
        path = self.root / directive["file"]
        if not path.is_file():
            raise Fault(f"there is no file {directive['file']}")
        text = path.read_text(encoding="utf-8")
        try:
            return (text, *region_lines(text, directive["region"]))
        except Fault as fault:
            raise Fault(f"{directive['file']}: {fault}") from None

    def filled(self, page):
        """The page's text with every excerpt as its file has it."""
        out, at = [], 0
        for directive in DIRECTIVE.finditer(page.text):
            if directive.start() < at:
                continue
            out.append(page.text[at : directive.end()])
            at = directive.end()
            try:
                code = excerpt(*self.region_of(directive))
            except Fault as fault:
                self.fault(page, directive.start(), fault)
                continue
            if directive["kind"] != "excerpt":
                continue
            language = "cpp" if directive["file"].endswith(".cpp") else "cuda"
            out.append(textwrap.indent(f"```{language}\n{code}\n```\n", directive["indent"]))
            block = BLOCK.match(page.text, at)
            if block:
                at = block.end()
        return "".join(out) + page.text[at:]

    def check_excerpts(self, page):
        filled = self.filled(page)
        if filled != page.text:
            at = next((n for n, (a, b) in enumerate(zip(filled, page.text)) if a != b), min(len(filled), len(page.text)))
            self.fault(page, at, "the excerpt is not what its file says; python3 docs/book.py fills it in")
        for block in FENCE.finditer(page.text):
            before = page.text[: block.start()]
            if block["language"] in ("cuda", "cpp") and not re.search(r"<!-- (excerpt|hole|answer|without) .+ -->\n\Z", before):
                self.fault(page, block.start(), "code without a line <!-- excerpt FILE: REGION --> before it")

    def check_kernels_shown(self, page):
        shown = {directive["file"] for directive in DIRECTIVE.finditer(page.text)}
        for id, path in self.steps.items():
            file = str(path.relative_to(self.root))
            if id.startswith(f"{page.path.stem}/") and file not in shown:
                self.fault(page, 0, f"nothing of {file} is shown: <!-- excerpt {file}: REGION -->")

    # -- Links, and what the site could not read

    def check_text(self, page):
        text = page.prose
        for not_text in (r"<!--.*?-->", r"\$\$.*?\$\$|\$[^$\n]+\$", r"`[^`]*`"):
            text = without(re.compile(not_text, re.DOTALL), text)
        for html in re.finditer(r"</?[A-Za-z]|\{\{", text):
            self.fault(page, html.start(), "HTML or {{ in the text, which GitHub and the site read differently; put it in backticks")
        for link in re.finditer(r"\[[^\]]*\]\(([^)\s]+)\)", text):
            target, _, anchor = link[1].partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            path = (page.path.parent / target).resolve() if target else page.path
            if not path.exists():
                self.fault(page, link.start(), f"link to {link[1]}: there is no such file")
            elif anchor and path.suffix == ".md" and anchor not in Page(path).anchors():
                self.fault(page, link.start(), f"link to {link[1]}: no heading there has this anchor")

    # -- Steps and files

    def step_fault(self, page, prefix):
        """Why a step's prefix means nothing, or None. A copy's steps are those of the chapter that was copied."""
        if int(prefix[:2]) >= FIRST_COPY:
            copied = re.search(rf"steps/(\d\d_\w+) steps/{prefix[:2]}_", page.text)
            chapter = copied[1] if copied else self.chapters.get(page.number)
            if not chapter:
                return None
            prefix = chapter + re.sub(r"^\d\d\w*", "", prefix)
        chapter, _, kernel = prefix.partition("/")
        for id in self.steps:
            if id.startswith(chapter) and id.split("/")[1].startswith(kernel):
                return None
        return f"there is no step {prefix}"

    def path_exists(self, page, name):
        """Whether a file that a page names exists: from the root, from steps/, the chapter or the page, or by its name."""
        if re.match(rf"steps/(NN|[{FIRST_COPY // 10}-9]\d)_|build/", name):
            return True
        if name.endswith(".py") and re.search(rf"^# {re.escape(name)}$", page.text, re.MULTILINE):
            return True  # a script that the page gives itself
        folders = [self.root, self.root / "steps", self.root / "steps" / self.chapters.get(page.number, ""), page.path.parent]
        return name in self.names or any((folder / name).exists() for folder in folders)

    def check_names(self, page):
        for offset, span in page.code_spans():
            if re.fullmatch(r"\d\d(_\w+)?(/\w*)?", span):
                why = self.step_fault(page, span)
                if why:
                    self.fault(page, offset, why)
            elif re.fullmatch(rf"[\w./-]+\.({SOURCE})", span) or re.fullmatch(r"(steps|docs|tests|reference_cpu)/[\w./-]*", span):
                if not self.path_exists(page, span):
                    self.fault(page, offset, f"there is no file {span}")
            elif page.number and re.fullmatch(r"[A-Za-z_][\w:]*(<[^>]*>)?(\(.*\))?", span):  # a name, of a function, say
                for word in re.findall(r"\w*(?:_|[a-z][A-Z])\w*", re.split(r"[<(]", span)[0]):
                    if word not in self.words and not re.search(rf"\b{word}\b", page.code):
                        self.fault(page, offset, f"{word} occurs nowhere in the code")
        for offset, line in page.shell_lines():
            for name in re.findall(r"(?<![\w/.-])(?:steps|docs|tests|reference_cpu)/[\w./-]+", line.split("#")[0]):
                if not self.path_exists(page, name) and name not in re.findall(r"--(?:csv|plot|out) (\S+)", line):
                    self.fault(page, offset, f"there is no file {name}")

    # -- Commands

    def check_command(self, page, offset, words, options):
        command, *rest = words or [""]
        if command.startswith("-") or not command:
            command, rest = "", words
        if command not in options:
            return self.fault(page, offset, f"flashsteps has no subcommand {command}")
        rest = iter(rest)
        for word in rest:
            word = word.strip("[]")
            if word.startswith("-"):
                if word not in options[command]:
                    self.fault(page, offset, f"flashsteps {command} has no option {word}")
                elif options[command][word]:
                    value, choices = next(rest, None), options[command][word]
                    if value is None:
                        self.fault(page, offset, f"flashsteps {command} {word} wants a value")
                    elif isinstance(choices, list) and value.strip("[]") not in choices and not value.isupper():
                        self.fault(page, offset, f"flashsteps {command} {word}: no {value} among {', '.join(choices)}")
            elif re.match(r"\d\d", word):
                why = self.step_fault(page, word)
                if why:
                    self.fault(page, offset, why)
            elif not re.fullmatch(r"[A-Z]+|…", word):
                self.fault(page, offset, f"flashsteps {command}: {word} is no step")

    def check_commands(self, page, options):
        every_option = set().union(*options.values())
        subcommand = re.compile("(" + "|".join(filter(None, options)) + r") (--|\d\d)")
        for offset, span in page.code_spans():
            if span.startswith("build/flashsteps"):
                self.check_command(page, offset, span.split()[1:], options)
            elif subcommand.match(span):
                self.check_command(page, offset, span.split(), options)
            elif re.fullmatch(r"--[a-z][\w-]*( [\w.-]+)?( --[a-z][\w-]*( [\w.-]+)?)*", span):
                for option in re.findall(r"--[a-z][\w-]*", span):
                    if option not in every_option:
                        self.fault(page, offset, f"no subcommand of flashsteps has an option {option}")
        for offset, line in page.shell_lines():
            for words in re.findall(r"build/flashsteps\b([^&;|#<>]*)", line):
                self.check_command(page, offset, words.split(), options)

    def check(self, flashsteps):
        options = options_of(flashsteps) if flashsteps else None
        for page in self.pages:
            self.check_excerpts(page)
            self.check_kernels_shown(page)
            self.check_text(page)
            self.check_names(page)
            if options:
                self.check_commands(page, options)

    # -- For the site

    def ladder(self):
        """The steps in the order of chapters and rungs, and of each the one before it: if there is one, of its pass."""
        text = {id: path.read_text(encoding="utf-8") for id, path in self.steps.items()}

        def rung(id):
            found = re.search(r"\.rung = (\d+)", text[id])
            return id[:2], int(found[1]) if found else 0

        def alike(a, b):
            return self.steps[a].suffix == self.steps[b].suffix and any(
                word in text[a] and word in text[b] for word in (".forward =", ".backward ="))

        order = sorted(self.steps, key=rung)
        before = {}
        for n, id in enumerate(order):
            earlier = [other for other in order[:n] if rung(other) < rung(id)]
            before[id] = next((other for other in reversed(earlier) if alike(other, id)), earlier[-1] if earlier else None)
        return order, before

    def for_site(self):
        """What each page shows, in order; the files, the steps among them with their place in the ladder and what changed."""
        def name(path):
            return str(path.relative_to(self.root))

        order, before = self.ladder()
        files = {name(self.steps[id]): {"step": id, "rung": n} for n, id in enumerate(order)}
        regions = {name(page.path): [] for page in self.pages}
        for page in self.pages:
            for directive in DIRECTIVE.finditer(page.text):
                _, first, last = self.region_of(directive)
                files.setdefault(directive["file"], {})
                regions[name(page.path)].append({"file": directive["file"], "first": first + 1, "last": last + 1})
        for path, file in files.items():
            file["text"] = (self.root / path).read_text(encoding="utf-8")
        for file in files.values():
            if file.get("step") and before[file["step"]]:
                file["before"] = name(self.steps[before[file["step"]]])
                lines = [text.split("\n") for text in (files[file["before"]]["text"], file["text"])]
                file["diff"] = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
        return {"regions": regions, "files": files}


def options_of(flashsteps):
    """Of each subcommand its options: None for a flag, True where a value follows, the list of them where it is one."""
    def help_of(*subcommand):
        return subprocess.run([flashsteps, *subcommand, "--help"], check=True, capture_output=True, text=True).stdout

    def options(text):
        found = {}
        for names, kind, what in re.findall(r"^  (-\S+)((?: [A-Z]+)*) +(.*)$", text, re.MULTILINE):
            choices = re.search(r"\(((?:\w+, )+\w+)\)$", what)
            for name in names.split(","):
                found[name] = True if kind.strip() else choices[1].split(", ") if choices else None
        return found

    top = help_of()
    names = re.findall(r"^  (\w+)  ", top[top.index("Subcommands:") :], re.MULTILINE)
    return {"": options(top), **{name: options(help_of(name)) for name in names}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--flashsteps", metavar="PROGRAM")
    parser.add_argument("--site", metavar="FILE", type=Path)
    parser.add_argument("--root", metavar="FOLDER", type=Path, default=ROOT)
    arguments = parser.parse_args()

    book = Book(arguments.root.resolve())
    if arguments.check:
        book.check(arguments.flashsteps)
    elif arguments.site:
        arguments.site.write_text(json.dumps(book.for_site(), ensure_ascii=False), encoding="utf-8")
    else:
        for page in book.pages:
            filled = book.filled(page)
            if filled != page.text:
                page.path.write_text(filled, encoding="utf-8")
                print(f"{page.path.relative_to(book.root)}: excerpts filled in")
    for fault in book.faults:
        print(fault, file=sys.stderr)
    return 1 if book.faults else 0


if __name__ == "__main__":
    sys.exit(main())
