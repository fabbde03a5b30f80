"""C++ as text: comments and strings are found as a compiler finds them, and offsets stay."""

from lessonkit.base.cpp_text import bare, codes, definitions, local_files, without_comments

import pytest


@pytest.mark.parametrize(
    ("text", "code", "plain"),
    [
        ("a // b", "a     ", "a     "),
        ("a // b \\\nc\nd", "a       \n \nd", "a       \n \nd"),  # a backslash continues the comment
        ("a /* b\n// */ c", "a     \n      c", "a     \n      c"),
        ('f("// no comment")', "f(" + " " * 15 + ")", 'f("// no comment")'),
        (r'f("\"", x)', "f(    , x)", r'f("\"", x)'),
        ('R"(a " // b)" + c', " " * 13 + " + c", 'R"(a " // b)" + c'),
        ('R"x(a )" b)x" + c', " " * 13 + " + c", 'R"x(a )" b)x" + c'),
        ("1'000'000 + 'a' // b", "1'000'000 +         ", "1'000'000 + 'a'     "),
        ("0xff'ff + 2", "0xff'ff + 2", "0xff'ff + 2"),
        ("'\"' + x // \"", "    + x     ", "'\"' + x     "),
    ],
)
def test_what_is_code(text, code, plain):
    assert bare(text) == code
    assert without_comments(text) == plain
    assert len(code) == len(plain) == len(text)


def test_a_definition_is_found_behind_what_only_looks_like_one():
    text = """// void comment() {}
const char* text = R"(void string() {})";
extern "C" {
void one(int n) { if (n > 1'000) puts("}"); }
}
namespace a { template <class T> struct Two { char c = '{'; }; }
#define THREE(x) \\
    (x)
"""
    assert [d.name for d in definitions(text)] == ["THREE", "text", "one", "Two"]
    assert codes("int f() { return 1; /* one */ }  // f")["f"] == ["int f ( ) { return 1 ; }"]


def test_a_program_and_its_headers(tmp_path):
    headers = tmp_path / "headers"
    headers.mkdir()
    (tmp_path / "p.cu").write_text('#include "own.cuh"\n# include "common.cuh"\n#include <vector>\n#include "none.h"\n')
    (tmp_path / "own.cuh").write_text('#include "p.cu"\n')
    (headers / "common.cuh").write_text('#include "deep.h"\n')
    (headers / "own.cuh").write_text("")
    (headers / "deep.h").write_text("")
    found = local_files(tmp_path / "p.cu", headers)
    assert found[0] == tmp_path / "p.cu"
    assert set(found[1:]) == {tmp_path / "own.cuh", headers / "common.cuh", headers / "deep.h"}
    assert local_files(tmp_path / "missing.cu", headers) == []
