//! The rules for one source file. Each returns what is wrong, one line a finding; the reason stands in the finding.

use crate::source::Source;

/// Lines of a file before its tests.
pub const FILE_LINES_MAX: usize = 600;

/// Lines of code of a function, arms of one line apart.
pub const FUNCTION_LINES_MAX: usize = 70;

/// Same for a test: it tells one story from top to bottom, and lists what it expects.
pub const TEST_LINES_MAX: usize = 140;

/// Files that may be longer, each with its reason: only lists that a program wrote.
const LONG_FILES: [(&str, &str); 0] = [];

/// Where `unsafe` is allowed: in packages that map memory, drive devices, or run inside another program.
pub const UNSAFE_HOMES: [&str; 4] =
    ["substrate/pmem/", "substrate/ipc/", "substrate/transport/", "interpose/"];

/// A file of the tree: its path from the root and its text.
pub struct File {
    pub path: String,
    pub text: String,
}

impl File {
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// A path under which only tests lie.
fn is_test_path(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.starts_with("fuzz/")
}

/// A word that these rules look for, in two halves, so that this file does not hold it.
fn word(first: &str, second: &str) -> String {
    format!("{first}{second}")
}

/// The rules for every text file.
pub fn check_text(file: &File) -> Vec<String> {
    let mut found = Vec::new();
    let mut say = |line: usize, what: &str| found.push(format!("{}:{}: {what}", file.path, line + 1));
    let places = [word("/wo", "rk/"), word("/ro", "ot/"), word("/ho", "me/")];
    let talk = [word("issue", " #"), word("as re", "quested"), word("the br", "ief"), word("this ta", "sk")];
    for (number, line) in file.text.lines().enumerate() {
        if line.chars().any(|c| !c.is_ascii() && c != '\u{a7}') {
            say(number, "not ASCII (the section sign apart): what looks alike must be alike in every editor");
        }
        if line != line.trim_end() {
            say(number, "white space at the end: it shows as a change that is none");
        }
        if line.contains('\t') && !file.path.ends_with("Makefile") {
            say(number, "a tab: only make needs them");
        }
        if places.iter().any(|p| line.contains(p.as_str())) {
            say(number, "a path of one machine: it is nothing to anybody else");
        }
        if talk.iter().any(|t| line.to_lowercase().contains(t.as_str())) {
            say(number, "speaks of how work is organised: the tree describes Hearth, git holds the history");
        }
    }
    if !file.text.is_empty() && !file.text.ends_with('\n') {
        say(file.text.lines().count() - 1, "no newline at the end: the next line added changes two");
    }
    found
}

/// The rules for every Rust file.
pub fn check_rust(file: &File) -> Vec<String> {
    let source = Source::new(&file.text);
    let mut found = check_shape(file, &source);
    found.extend(check_markers(file, &source));
    found.extend(check_comments(file, &source));
    found.extend(check_test_branches(file, &source));
    if !UNSAFE_HOMES.iter().any(|home| file.path.starts_with(home)) {
        for (number, line) in source.code.iter().enumerate().filter(|(_, l)| has_word(l, "unsafe")) {
            if !line.contains(&word("forbid(un", "safe_code)")) {
                found.push(format!(
                    "{}:{}: unsafe outside {}: a few homes can be read with care, a whole tree cannot",
                    file.path,
                    number + 1,
                    UNSAFE_HOMES.join(", ")
                ));
            }
        }
    }
    found
}

/// Head, file length, function length.
fn check_shape(file: &File, source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    if !file.text.starts_with("//! ") {
        found.push(format!(
            "{}: does not begin with `//!`: a reader learns from the first lines what a module is for",
            file.path
        ));
    }
    let lines = source.shipped_lines();
    if lines > FILE_LINES_MAX && !LONG_FILES.iter().any(|(path, _)| *path == file.path) {
        found.push(format!(
            "{}: {lines} lines before its tests, more than {FILE_LINES_MAX}: look for the second subject, \
             files only grow",
            file.path
        ));
    }
    for (name, first, last) in source.functions() {
        let lines = source.code_lines(first, last);
        let is_test = is_test_path(&file.path) || first > source.shipped_lines();
        let lines_max = if is_test { TEST_LINES_MAX } else { FUNCTION_LINES_MAX };
        if lines > lines_max {
            found.push(format!(
                "{}:{}: fn {name} has {lines} lines of code, more than {lines_max}: it fits no screen",
                file.path,
                first + 1
            ));
        }
    }
    found
}

/// Words that say that something is not finished, or was left behind.
fn check_markers(file: &File, source: &Source) -> Vec<String> {
    let macros = [word("to", "do!"), word("unimple", "mented!"), word("db", "g!")];
    let notes = [word("TO", "DO"), word("FIX", "ME"), word("XX", "X"), word("HA", "CK")];
    let ignored = word("#[ig", "nore");
    let mut found = Vec::new();
    for (number, (code, comment)) in source.code.iter().zip(&source.comments).enumerate() {
        let mut say = |what: String| found.push(format!("{}:{}: {what}", file.path, number + 1));
        for name in macros.iter().filter(|m| code.contains(m.as_str())) {
            say(format!("{name} is a stub or a leftover: what is not finished is not there"));
        }
        for note in notes.iter().filter(|n| has_word(comment, n)) {
            say(format!("{note}: what is to be done is said where it is planned, not in the source"));
        }
        if code.contains(&ignored) {
            say("a test that nobody runs: put its count behind HEARTH_PROVE and run a slice".to_string());
        }
    }
    found
}

/// Comments that are code: git has what was removed.
fn check_comments(file: &File, source: &Source) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_fence = false;
    for (number, comment) in source.comments.iter().enumerate() {
        let text = comment.trim();
        let is_doc = text.starts_with("///") || text.starts_with("//!");
        let body = text.trim_start_matches(['/', '!']).trim();
        if is_doc && body.starts_with("```") {
            in_fence = !in_fence;
        }
        if !is_doc && !in_fence && looks_like_code(body) {
            let line = number + 1;
            found
                .push(format!("{}:{line}: commented-out code `{body}`: git has what was removed", file.path));
        }
    }
    found
}

fn looks_like_code(text: &str) -> bool {
    let starts = ["let ", "pub fn ", "fn ", "use ", "if let ", "#[", "assert!(", "assert_eq!(", "return "];
    let ends = [";", "{", "}", "},", ");"];
    let call = text.ends_with(';') && text.contains('(');
    call || matches!(text, "}" | "};" | "})" | "});")
        || (starts.iter().any(|s| text.starts_with(s)) && ends.iter().any(|e| text.ends_with(e)))
}

/// The shipped code is the tested code: `cfg(test)` may only stand before the module of tests.
fn check_test_branches(file: &File, source: &Source) -> Vec<String> {
    let condition = word("cfg(te", "st)");
    let other_forms = [word("cfg(not(te", "st))"), word("cfg!(te", "st)"), word("cfg_attr(te", "st")];
    let mut found = Vec::new();
    for (number, line) in source.code.iter().enumerate() {
        let mut after = source.code[number + 1..].iter().filter(|l| !l.trim().starts_with("#["));
        let mut before_module = || after.next().is_some_and(|l| has_word(l, "mod"));
        let wrong = other_forms.iter().any(|f| line.contains(f.as_str()))
            || (line.contains(&condition) && !before_module());
        if wrong && !file.path.ends_with("/sync.rs") && !is_test_path(&file.path) {
            found.push(format!(
                "{}:{}: {condition} in shipped code: what is tested must be what ships",
                file.path,
                number + 1
            ));
        }
    }
    found
}

/// A crate's first file says that it holds no unsafe code, if it may not hold any.
pub fn check_crate_root(file: &File) -> Vec<String> {
    let forbids = file.text.lines().any(|l| l.trim() == word("#![forbid(un", "safe_code)]"));
    let may = UNSAFE_HOMES.iter().any(|home| file.path.starts_with(home));
    if may || forbids {
        return Vec::new();
    }
    vec![format!(
        "{}: no #![forbid(...)] of unsafe code: the compiler keeps the rule everywhere else",
        file.path
    )]
}

fn has_word(line: &str, word: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(is_word) && !line[at + word.len()..].starts_with(is_word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(path: &str, text: &str) -> usize {
        let file = File { path: path.to_string(), text: text.to_string() };
        check_text(&file).len() + if file.is_rust() { check_rust(&file).len() } else { 0 }
    }

    /// Each text breaks one rule once; without the planted part it breaks none.
    #[test]
    fn every_rule_can_fail() {
        let long_file = "//! A.\n".to_string() + &"const A: u8 = 1;\n".repeat(FILE_LINES_MAX);
        let longest_file = long_file.trim_end_matches("const A: u8 = 1;\n").to_string()
            + &"const A: u8 = 1;\n".repeat(FILE_LINES_MAX - 1);
        let statements = "    f();\n".repeat(FUNCTION_LINES_MAX - 1);
        let planted: Vec<(&str, String)> = vec![
            ("a caf\u{e9} of \u{a7}3", "not ASCII".into()),
            ("ends in a blank ", "white space".into()),
            ("a\ttab", "tab".into()),
        ];
        for (text, rule) in planted {
            assert_eq!(complaints("a.md", &format!("{text}\n")), 1, "{rule}");
        }
        assert_eq!(complaints("a.md", "no end"), 1, "newline at the end");
        assert_eq!(complaints("a.md", &(word("see /wo", "rk/x") + "\n")), 1, "a path of one machine");
        assert_eq!(complaints("a.md", &(word("see Issue", " #7") + "\n")), 1, "how work is organised");
        assert_eq!(complaints("a.rs", "const A: u8 = 1;\n"), 1, "head");
        assert_eq!(complaints("a.rs", &long_file), 1, "long file");
        assert_eq!(complaints("a.rs", &longest_file), 0, "the longest file that may be");
        let in_tests = format!("//! A.\n{}\nmod tests {{}}\n{long_file}", word("#[cfg(te", "st)]"));
        assert_eq!(complaints("a.rs", &in_tests), 0, "tests may be longer");
        assert_eq!(complaints("a.rs", &format!("//! A.\nfn a() {{\n{statements}}}\n")), 1, "long function");
        let arms = statements.replace("f();", "1 => 2,");
        assert_eq!(
            complaints("a.rs", &format!("//! A.\nfn a() {{\n{arms}}}\n")),
            0,
            "a flat match is a table"
        );
        let mut lines = vec![
            word("fn a() { to", "do!() }"),
            word("fn a() { db", "g!(1) }"),
            word("// TO", "DO later"),
            word("#[ig", "nore = \"slow\"]"),
            "// let a = 1;".to_string(),
            "// self.append(frame);".to_string(),
            word("fn a() { if cfg!(te", "st) {} }"),
            word("#[cfg(te", "st)]\nfn a() {}"),
            word("un", "safe fn a() {}"),
        ];
        for line in lines.drain(..) {
            assert_eq!(complaints("a/src/a.rs", &format!("//! A.\n{line}\n")), 1, "{line}");
        }
    }

    #[test]
    fn what_is_right_is_let_through() {
        let unsafe_line = word("un", "safe fn a() {}");
        assert_eq!(complaints("substrate/pmem/src/a.rs", &format!("//! A.\n{unsafe_line}\n")), 0);
        let tests = word("#[cfg(te", "st)]\nmod tests;");
        assert_eq!(
            complaints("a/src/a.rs", &format!("//! A.\n{tests}\n// It returns a value; see b().\n")),
            0
        );
        assert_eq!(complaints("a/src/a.rs", "//! A.\nconst WHY: &str = \"// let a = 1;\";\n"), 0);
    }

    #[test]
    fn a_crate_root_without_its_promise_is_found() {
        let root = |path: &str, text: &str| {
            check_crate_root(&File { path: path.to_string(), text: text.to_string() }).len()
        };
        assert_eq!(root("vfs/src/lib.rs", "//! A.\n"), 1);
        assert_eq!(root("vfs/src/lib.rs", &(word("//! A.\n#![forbid(un", "safe_code)]") + "\n")), 0);
        assert_eq!(root("substrate/pmem/src/lib.rs", "//! A.\n"), 0);
    }
}
