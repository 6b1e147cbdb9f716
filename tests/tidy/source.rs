//! Rust source as the rules see it: code, comments and text literals kept apart, so that a brace in a string or a
//! keyword in a comment never counts.

/// One source file, taken apart. `code` and `comments` have as many lines as the file.
pub struct Source {
    /// The file with comments removed and the contents of text literals blanked.
    pub code: Vec<String>,
    /// The comments of each line, with their slashes.
    pub comments: Vec<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum ScanState {
    Code,
    LineComment,
    BlockComment(u32),
    /// In a text literal; the number of `#` that end a raw one, `None` where a backslash escapes.
    Text(Option<usize>),
}

impl Source {
    /// Takes a file apart.
    pub fn new(text: &str) -> Self {
        let chars: Vec<char> = text.chars().collect();
        let chars = chars.strip_suffix(&['\n']).unwrap_or(&chars);
        let mut source = Self { code: vec![String::new()], comments: vec![String::new()] };
        let mut state = ScanState::Code;
        let mut at = 0;
        while at < chars.len() {
            if chars[at] == '\n' {
                source.code.push(String::new());
                source.comments.push(String::new());
                if state == ScanState::LineComment {
                    state = ScanState::Code;
                }
                at += 1;
                continue;
            }
            let (next, taken) = step(state, chars, at);
            let comment = |s| matches!(s, ScanState::LineComment | ScanState::BlockComment(_));
            let line = if comment(state) || comment(next) { &mut source.comments } else { &mut source.code };
            let line = line.last_mut().expect("a file has a first line");
            let is_character = state == ScanState::Code && chars[at] == '\'' && taken > 1;
            let inside = matches!((state, next), (ScanState::Text(_), ScanState::Text(_)));
            for c in &chars[at..at + taken] {
                line.push(if inside || is_character { ' ' } else { *c });
            }
            state = next;
            at += taken;
        }
        source
    }

    /// Lines before the module of unit tests, which stands last.
    pub fn shipped_lines(&self) -> usize {
        let is_test_head = |line: &String| line.trim_start().starts_with("#[cfg(test)]");
        self.code.iter().position(is_test_head).unwrap_or(self.code.len())
    }

    /// Functions with the lines they stand on: name, first line, last line, counted from 0.
    pub fn functions(&self) -> Vec<(String, usize, usize)> {
        let mut found = Vec::new();
        for (number, line) in self.code.iter().enumerate() {
            let Some(name) = function_name(line) else { continue };
            if let Some(last) = self.end_of_body(number) {
                found.push((name, number, last));
            }
        }
        found
    }

    /// Lines of code in a range: neither blank nor comment, and without the arms of a match that take one line,
    /// since a flat match over kinds is read as a table.
    pub fn code_lines(&self, first: usize, last: usize) -> usize {
        let is_arm = |line: &str| line.contains(" => ") && line.ends_with(',');
        self.code[first..=last].iter().map(|l| l.trim()).filter(|l| !l.is_empty() && !is_arm(l)).count()
    }

    /// The last line of the body that opens on or after a line; `None` for a declaration without body.
    fn end_of_body(&self, first: usize) -> Option<usize> {
        let mut depth = 0i32;
        for (number, line) in self.code.iter().enumerate().skip(first) {
            for c in line.chars() {
                match c {
                    '{' => depth += 1,
                    '}' => depth -= 1,
                    ';' if depth == 0 && !line.contains('[') => return None,
                    _ => continue,
                }
                if depth == 0 && c == '}' {
                    return Some(number);
                }
            }
        }
        None
    }
}

/// The next step in a state: the new state, and how many characters belong to the step.
fn step(state: ScanState, chars: &[char], at: usize) -> (ScanState, usize) {
    let starts = |text: &str| text.chars().enumerate().all(|(i, c)| chars.get(at + i) == Some(&c));
    match state {
        ScanState::LineComment => (state, 1),
        ScanState::BlockComment(depth) if starts("*/") => {
            (if depth == 1 { ScanState::Code } else { ScanState::BlockComment(depth - 1) }, 2)
        }
        ScanState::BlockComment(depth) if starts("/*") => (ScanState::BlockComment(depth + 1), 2),
        ScanState::BlockComment(_) => (state, 1),
        ScanState::Text(None) if chars[at] == '\\' && chars.get(at + 1).is_some_and(|c| *c != '\n') => {
            (state, 2)
        }
        ScanState::Text(None) if chars[at] == '"' => (ScanState::Code, 1),
        ScanState::Text(Some(hashes)) if chars[at] == '"' && hashes_at(chars, at + 1) >= hashes => {
            (ScanState::Code, 1 + hashes)
        }
        ScanState::Text(_) => (state, 1),
        ScanState::Code if starts("//") => (ScanState::LineComment, 2),
        ScanState::Code if starts("/*") => (ScanState::BlockComment(1), 2),
        ScanState::Code if chars[at] == '"' => (ScanState::Text(None), 1),
        ScanState::Code if chars[at] == 'r' && begins_word(chars, at) => {
            let hashes = hashes_at(chars, at + 1);
            let raw = chars.get(at + 1 + hashes) == Some(&'"');
            if raw { (ScanState::Text(Some(hashes)), 2 + hashes) } else { (state, 1) }
        }
        ScanState::Code if chars[at] == '\'' && chars.get(at + 2) == Some(&'\'') => (state, 3),
        ScanState::Code if chars[at] == '\'' && chars.get(at + 1) == Some(&'\\') => {
            let end = chars[at + 2..].iter().skip(1).position(|c| *c == '\'').unwrap_or(0);
            (state, end + 4)
        }
        ScanState::Code => (state, 1),
    }
}

fn hashes_at(chars: &[char], at: usize) -> usize {
    chars[at.min(chars.len())..].iter().take_while(|c| **c == '#').count()
}

/// True if an `r` here can open a raw text: no word before it, or only the `b` of a byte text.
fn begins_word(chars: &[char], at: usize) -> bool {
    let is_word = |i: usize| chars[i].is_alphanumeric() || chars[i] == '_';
    at == 0 || !is_word(at - 1) || (chars[at - 1] == 'b' && (at == 1 || !is_word(at - 2)))
}

/// The name of the function that a line declares.
fn function_name(line: &str) -> Option<String> {
    let rest = line.trim_start();
    let at = if rest.starts_with("fn ") { Some(0) } else { rest.find(" fn ").map(|at| at + 1) }?;
    let words_before = rest[..at].split_whitespace().collect::<Vec<_>>();
    let qualifies =
        |w: &str| w.starts_with("pub") || matches!(w, "const" | "async" | "unsafe" | "extern" | "\"");
    let name: String = rest[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!name.is_empty() && words_before.iter().all(|w| qualifies(w))).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_texts_are_not_code() {
        let text = "let a = \"{ // no\"; // yes {\nlet b = r#\"}\"}\"#; /* x /* y */ z */ let c = '\\'';\n";
        let source = Source::new(text);
        assert_eq!(source.code[0].trim_end(), "let a = \"       \";");
        assert_eq!(source.comments[0], "// yes {");
        assert!(!source.code[1].contains('}') && source.code[1].contains("let c"));
        let marks = Source::new("m('\"', b'{', br\"}\", &'a str) // end");
        assert_eq!(marks.code[0].trim_end(), "m(   , b   , br\" \", &'a str)");
        assert_eq!(source.comments[1], "/* x /* y */ z */");
    }

    #[test]
    fn a_function_ends_where_its_body_ends() {
        let text = "trait T {\n fn none(&self) -> u8;\n pub(crate) const fn some(a: [u8; 4])\n {\n  if a { \"}\" }\n }\n}\n";
        let found = Source::new(text).functions();
        assert_eq!(found, [("some".to_string(), 2, 5)]);
    }

    #[test]
    fn arms_of_one_line_and_blank_lines_do_not_count() {
        let source = Source::new("fn f() {\n match x {\n  1 => 2,\n  // why\n\n  3 => {\n   4\n  }\n }\n}");
        assert_eq!(source.code_lines(0, 9), 7);
    }
}
