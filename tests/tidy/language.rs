//! Plain technical English in comments, documents and type names: sentences with a subject, and the words of the field.
//!
//! The rules hold for the packages and documents of [`REWRITTEN`]. That list only grows: a package is added when its
//! prose has been rewritten, and packages outside the list are not checked. The rules look at single words and at the
//! word before and after them, so they find a part of the bad sentences and leave good ones in peace.

use crate::rules::File;
use crate::source::Source;

/// Folders (with a slash at the end) and files whose prose keeps the rules. Entries are added, never removed.
pub const REWRITTEN: [&str; 32] = [
    "engines/assise/area/",
    "engines/assise/ccnvm/",
    "engines/assise/libfs/",
    "engines/assise/mirror/",
    "engines/assise/sharedfs/",
    "fuzz/",
    "gateway/",
    "interpose/",
    "sim/",
    "src/",
    "substrate/cluster/",
    "substrate/format/",
    "substrate/ipc/",
    "substrate/pmem/",
    "substrate/transport/",
    "tests/",
    "vfs/",
    "ARCHITECTURE.md",
    "README.md",
    "docs/cluster.md",
    "docs/compatibility.md",
    "docs/decisions/",
    "docs/digest.md",
    "docs/glossary.md",
    "docs/media-format.md",
    "docs/mount.md",
    "docs/protocol.md",
    "docs/replication-schedules.md",
    "docs/replication.md",
    "docs/semantics.md",
    "docs/sessions.md",
    "docs/testing.md",
];

/// Words of a private vocabulary, with the word that an engineer of the field knows. Ordinary words that have a private
/// meaning too (place, room, promise, life, told) are missing here, because most of their uses are fine.
const PRIVATE_WORDS: [(&[&str], &str); 16] = [
    (&["door", "doors"], "listener"),
    (&["knock", "knocks", "knocked", "knocking"], "connection request"),
    (&["talk", "talks", "talking"], "control channel (noun), communicate (verb)"),
    (&["estate", "estates"], "detached session"),
    (&["heir", "heirs"], "successor of a session"),
    (&["lifeline", "lifelines"], "liveness socket"),
    (&["sheet", "sheets"], "shared open-file table"),
    (&["gift", "gifts"], "inherited files"),
    (&["eject", "ejects", "ejected", "ejection"], "terminate a session"),
    (&["flip", "flips", "flipped"], "commit of the root"),
    (&["settle", "settles", "settled", "settling"], "sync"),
    (&["entitle", "entitles", "entitled", "entitlement"], "authorize"),
    (&["upkeep"], "maintenance"),
    (&["beat", "beats"], "heartbeat"),
    (&["party", "parties"], "member incarnation"),
    (&["news"], "notification"),
];

/// Two words that are one private word.
const PRIVATE_PAIRS: [(&str, &str, &str); 6] = [
    ("let", "in", "accept"),
    ("lets", "in", "accept"),
    ("letting", "in", "accept"),
    ("turn", "away", "reject"),
    ("turns", "away", "reject"),
    ("turned", "away", "reject"),
];

/// Names that say neither of what nor for whom, as the whole name of a type.
const BARE_NAMES: [&str; 21] = [
    "Came", "Core", "Done", "Drawn", "Given", "Heard", "Held", "Kept", "Known", "Left", "Made", "Met",
    "Place", "Seen", "State", "Stopped", "Taken", "Talked", "Told", "Waited", "Work",
];

/// Names that are not changed yet: public ones with users in packages outside the list, and those of packages of which
/// only the comments were rewritten.
const NAMES_IN_USE: [(&str, &str); 10] = [
    ("engines/assise/libfs/", "Given"),
    ("engines/assise/libfs/", "State"),
    ("engines/assise/sharedfs/", "Core"),
    ("engines/assise/sharedfs/", "State"),
    ("substrate/cluster/", "Done"),
    ("substrate/cluster/", "Party"),
    ("substrate/cluster/", "Place"),
    ("substrate/ipc/", "Taken"),
    ("substrate/ipc/", "Waited"),
    ("vfs/", "Place"),
];

/// Words that never name the subject of a sentence.
const NO_SUBJECTS: [&str; 6] = ["nobody", "somebody", "anybody", "everybody", "someone", "anyone"];

/// Words after which a clause begins, so that the next word is its subject.
const OPENERS: [&str; 10] =
    ["if", "when", "because", "so", "while", "until", "unless", "whether", "that", "than"];

/// Words before an object.
const PREPOSITIONS: [&str; 8] = ["of", "to", "by", "from", "with", "for", "against", "but"];

/// Words that can only follow an object: the word before them was no subject.
const AFTER_OBJECTS: [&str; 14] =
    ["a", "an", "the", "its", "their", "this", "of", "to", "by", "from", "with", "for", "in", "at"];

/// Whether the prose of a file is checked.
pub fn is_rewritten(path: &str, rewritten: &[&str]) -> bool {
    rewritten.iter().any(|entry| if entry.ends_with('/') { path.starts_with(entry) } else { path == *entry })
}

/// The findings about the prose and the type names of a file, one line each.
pub fn check(file: &File) -> Vec<String> {
    let is_source = file.is_rust() || [".c", ".h"].iter().any(|ending| file.path.ends_with(ending));
    let mut found = Vec::new();
    let mut say = |line: usize, text: String| found.push(format!("{}:{}: {text}", file.path, line + 1));
    if is_source {
        let source = Source::new(&file.text);
        comment_paragraphs(&source).iter().for_each(|paragraph| check_paragraph(paragraph, &mut say));
        for (number, line) in source.code.iter().enumerate() {
            if !NAMES_IN_USE
                .iter()
                .any(|(home, name)| file.path.starts_with(home) && declared_type(line) == *name)
            {
                check_type_name(line, |text| say(number, text));
            }
        }
    } else if file.path.ends_with(".md") {
        document_paragraphs(&file.text).iter().for_each(|paragraph| check_paragraph(paragraph, &mut say));
    }
    found
}

/// A word or a mark of punctuation, in lower case, and the line it stands on. Code is one token, a backtick.
#[derive(Debug, PartialEq)]
struct Token {
    text: String,
    line: usize,
}

/// Running text, without what stands in code.
#[derive(Default)]
struct Paragraph {
    tokens: Vec<Token>,
    in_code: bool,
    is_doc_comment: bool,
}

impl Paragraph {
    fn is_mark(text: &str) -> bool {
        !text.chars().all(|c| c.is_alphanumeric() || matches!(c, '\'' | '-' | '`'))
    }

    /// Takes one line apart. A code span may go on over the end of the line.
    fn add_line(&mut self, text: &str, line: usize) {
        let chars: Vec<char> = text.chars().collect();
        let mut at = 0;
        while at < chars.len() {
            let start = at;
            at += 1;
            if chars[start] == '`' {
                self.in_code = !self.in_code;
                if self.in_code {
                    self.tokens.push(Token { text: "`".to_string(), line });
                }
            } else if self.in_code || chars[start].is_whitespace() {
            } else if chars[start] == ']' && chars.get(at) == Some(&'(') {
                // The target of a link is no prose.
                at = chars[at..].iter().position(|c| *c == ')').map_or(chars.len(), |end| at + end + 1);
            } else if chars[start].is_alphanumeric() {
                let is_word = |i: usize| {
                    chars[i].is_alphanumeric()
                        || matches!(chars[i], '_' | '\'' | '-')
                        || (chars[i] == '.' && chars.get(i + 1).is_some_and(|c| c.is_alphanumeric()))
                };
                while at < chars.len() && is_word(at) {
                    at += 1;
                }
                let word: String = chars[start..at].iter().collect();
                self.tokens.push(Token { text: word.to_lowercase(), line });
            } else {
                self.tokens.push(Token { text: chars[start].to_string(), line });
            }
        }
    }
}

/// The comments of a source, joined to paragraphs: a paragraph ends at a line of code, a blank comment line, an item
/// of a list, a heading, or a change between documentation and other comments.
fn comment_paragraphs(source: &Source) -> Vec<Paragraph> {
    let mut paragraphs: Vec<Paragraph> = Vec::new();
    let mut kind = "";
    let mut in_fence = false;
    for (line, (comment, code)) in source.comments.iter().zip(&source.code).enumerate() {
        let trimmed = comment.trim();
        let this = ["///", "//!", "//", "/*", ""].into_iter().find(|k| trimmed.starts_with(k)).unwrap_or("");
        let in_block = this.is_empty() && !trimmed.is_empty();
        let text = trimmed.trim_start_matches(['/', '!', '*']).trim_end_matches("*/").trim();
        if text.starts_with("```") {
            in_fence = !in_fence;
        }
        let skipped = text.is_empty() || text.starts_with("```") || text.starts_with('#') || in_fence;
        let begins = !in_block && (this != kind || !code.trim().is_empty());
        if begins || skipped || text.starts_with("- ") || paragraphs.is_empty() {
            paragraphs.push(Paragraph { is_doc_comment: this == "///", ..Paragraph::default() });
        }
        if !in_block {
            kind = this;
        }
        if !skipped {
            paragraphs.last_mut().expect("one was added above").add_line(text, line);
        }
    }
    paragraphs.retain(|paragraph| !paragraph.tokens.is_empty());
    paragraphs
}

/// The running text of a Markdown document; each cell of a table is a paragraph.
fn document_paragraphs(text: &str) -> Vec<Paragraph> {
    let mut paragraphs = vec![Paragraph::default()];
    let mut in_fence = false;
    for (line, text) in text.lines().enumerate() {
        let trimmed = text.trim();
        if trimmed.starts_with("```") {
            in_fence = !in_fence;
        }
        let is_code = in_fence || trimmed.starts_with("```") || text.starts_with("    ");
        let begins =
            trimmed.is_empty() || is_code || trimmed.starts_with(['#', '|']) || trimmed.starts_with("- ");
        if begins {
            paragraphs.push(Paragraph::default());
        }
        if is_code {
            continue;
        }
        for (index, cell) in trimmed.split('|').enumerate() {
            if index > 0 {
                paragraphs.push(Paragraph::default());
            }
            paragraphs.last_mut().expect("there is a first one").add_line(cell, line);
        }
    }
    paragraphs.retain(|paragraph| !paragraph.tokens.is_empty());
    paragraphs
}

fn check_paragraph(paragraph: &Paragraph, say: &mut impl FnMut(usize, String)) {
    let mut sentences: Vec<&[Token]> =
        paragraph.tokens.split_inclusive(|t| matches!(t.text.as_str(), "." | "?" | "!")).collect();
    sentences.retain(|sentence| !sentence.iter().all(|t| Paragraph::is_mark(&t.text)));
    for sentence in &sentences {
        check_subjects(sentence, say);
        check_words(sentence, say);
    }
    if paragraph.is_doc_comment
        && let [sentence] = sentences[..]
        && let [word] | [word, _] = sentence
        && ["who", "whom", "whose", "what", "which", "where", "why"].contains(&word.text.as_str())
    {
        say(
            word.line,
            format!("`{}` alone documents nothing: say what the item holds, or its unit", word.text),
        );
    }
}

/// Sentences and clauses whose subject is a pronoun that names nothing.
fn check_subjects(sentence: &[Token], say: &mut impl FnMut(usize, String)) {
    let is_question = sentence.last().is_some_and(|t| t.text == "?");
    let at = |index: usize| sentence.get(index).map_or("", |t| t.text.as_str());
    for (index, token) in sentence.iter().enumerate() {
        let before = if index == 0 { "" } else { at(index - 1) };
        let begins = index == 0 || matches!(before, ";" | ":" | "(") || OPENERS.contains(&before);
        let next = if at(index + 1) == "else" { at(index + 2) } else { at(index + 1) };
        let is_object = PREPOSITIONS.contains(&before)
            || AFTER_OBJECTS.contains(&next)
            || next.is_empty()
            || Paragraph::is_mark(next);
        let names_nothing = match token.text.as_str() {
            "whoever" | "whomever" => true,
            "who" => !is_question && (begins || PREPOSITIONS.contains(&before)),
            "what" => !is_question && begins,
            word => NO_SUBJECTS.contains(&word) && !is_object,
        };
        if names_nothing {
            say(
                token.line,
                format!(
                    "`{}` as the subject: name the process, thread, client or value, so that the sentence can be read \
                     without the code",
                    token.text
                ),
            );
        }
    }
    let determiner = ["the", "a", "an", "its", "only", "not"].contains(&at(2));
    let relative = |index: usize| ["that", "who", "which"].contains(&at(index));
    if at(0) == "it" && ["is", "was"].contains(&at(1)) && determiner && (4..=6).any(relative) {
        say(sentence[0].line, "`it is ... that`: begin with the subject itself".to_string());
    }
}

/// Words of the private vocabulary, and persons where there are processes.
fn check_words(sentence: &[Token], say: &mut impl FnMut(usize, String)) {
    let has = |words: &[&str]| sentence.iter().any(|t| words.contains(&t.text.as_str()));
    let of_bits = has(&["bit", "bits", "byte", "bytes"]);
    for (index, token) in sentence.iter().enumerate() {
        let before = if index == 0 { "" } else { sentence[index - 1].text.as_str() };
        let word = token.text.trim_end_matches("'s").trim_end_matches('\'');
        if ["he", "him", "his", "himself"].contains(&word) {
            say(token.line, format!("`{word}`: a process, a session or a node is `it`, a user is `they`"));
        }
        let known = PRIVATE_WORDS.iter().find(|(words, _)| words.contains(&word));
        let ordinary = (word.starts_with("flip") && of_bits) || (word == "party" && before == "third");
        if let Some((_, standard)) = known.filter(|_| !ordinary) {
            say(token.line, format!("`{word}` is a word of this project alone: {standard}"));
        }
        let pair = PRIVATE_PAIRS.iter().find(|(first, second, _)| {
            let second_at = sentence[index..].iter().take(4).position(|t| t.text == *second);
            *first == token.text
                && second_at.is_some_and(|at| {
                    // "in" and "away" end what they belong to; "in the file" does not.
                    sentence.get(index + at + 1).is_none_or(|t| Paragraph::is_mark(&t.text))
                })
        });
        if let Some((first, second, standard)) = pair {
            say(token.line, format!("`{first} {second}` is a word of this project alone: {standard}"));
        }
    }
}

/// The name of the type that a line of code declares; empty if it declares none.
fn declared_type(line: &str) -> &str {
    let mut words = line.split_whitespace().skip_while(|w| w.starts_with("pub"));
    match (words.next(), words.next()) {
        (Some("struct" | "enum" | "trait" | "union" | "type"), Some(rest)) => {
            rest.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default()
        }
        _ => "",
    }
}

/// The name of a type that a line of code declares: a noun of the field that says of what.
fn check_type_name(line: &str, mut say: impl FnMut(String)) {
    let name = declared_type(line);
    if BARE_NAMES.contains(&name) {
        say(format!("type {name}: says neither of what nor for whom; put its subject in front"));
    }
    let parts = camel_parts(name);
    for (private, standard) in &PRIVATE_WORDS {
        if parts.iter().any(|part| private.contains(&part.as_str())) {
            say(format!("type {name}: a word of this project alone: {standard}"));
        }
    }
}

/// The words of a name in camel case, in lower case.
fn camel_parts(name: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    for c in name.chars() {
        if c.is_uppercase() || parts.is_empty() {
            parts.push(String::new());
        }
        parts.last_mut().expect("one was added above").extend(c.to_lowercase());
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> usize {
        check(&File { path: path.to_string(), text: text.to_string() }).len()
    }

    #[test]
    fn a_sentence_without_a_subject_is_found() {
        for text in [
            "Who holds the lock waits.",
            "The daemon ends it. What was written stays.",
            "It is closed when nobody holds it.",
            "A lock nobody holds is free.",
            "Memory that nobody else writes stays.",
            "Somebody may sleep.",
            "Pairs with the store of who waits.",
            "Keeps it for whoever asks.",
            "It fails: what was read is gone.",
            "It is the daemon that ends the session.",
            "The process ends his session.",
        ] {
            assert_eq!(findings("a.md", &format!("{text}\n")), 1, "{text}");
            assert_eq!(findings("a.rs", &format!("/// {text}\nfn a() {{}}\n")), 1, "{text}");
            assert_eq!(findings("a.c", &format!("/* {text} */\nint a;\n")), 1, "{text}");
        }
        assert_eq!(findings("a.rs", "/// It fails if\n/// nobody waits.\nfn a() {}\n"), 1, "over two lines");
        assert_eq!(findings("a.rs", "/// Who.\nfn a() {}\n"), 2, "alone, and no subject");
        assert_eq!(findings("a.md", "| a | Who asks waits |\n"), 1, "in a table");
    }

    #[test]
    fn plain_english_is_let_through() {
        for text in [
            "A process that holds the lock waits.",
            "A user who owns the file may change its mode; another user, who does not, may not.",
            "The call says what is wrong and who may change it.",
            "What does a completion mean?",
            "Copies what was stored, and belongs to nobody.",
            "The number of nobody, and `nobody` in code.",
            "It is certain that it ends.",
            "It is a lock, and the file that it guards is mapped.",
            "Flips one bit of a byte.",
            "A third party signs it. The heartbeat is sent.",
            "The bits let in the file system decide.",
            "See [the `door`](door.md#what-knocks).",
        ] {
            assert_eq!(findings("a.md", &format!("{text}\n")), 0, "{text}");
        }
        assert_eq!(findings("a.rs", "fn a() { b(\"nobody knocks\") } // It ends.\n"), 0, "no comment");
        assert_eq!(findings("a.md", "```\nnobody is here\n```\n    who is there\n"), 0, "code");
        assert_eq!(findings("a.rs", "//! ```\n//! nobody is here\n//! ```\n"), 0, "code in a comment");
    }

    #[test]
    fn a_private_word_is_found() {
        for (words, _) in &PRIVATE_WORDS {
            for word in *words {
                assert_eq!(findings("a.md", &format!("The {word} ends.\n")), 1, "{word}");
            }
        }
        assert_eq!(findings("a.md", "The daemon lets a client in.\n"), 1);
        assert_eq!(findings("a.md", "It is turned away, and ends.\n"), 1);
        assert_eq!(findings("a.md", "The `door` of it.\n"), 0, "code");
    }

    #[test]
    fn a_type_that_is_no_noun_of_the_field_is_found() {
        for line in ["pub struct Held {", "enum State {", "pub(crate) struct DoorLimits;", "struct News(u8);"]
        {
            assert_eq!(findings("a.rs", &format!("{line}\n")), 1, "{line}");
        }
        for line in ["pub struct HeldLease {", "enum SlotState {", "let held: Held = 1;", "struct Newspaper;"]
        {
            assert_eq!(findings("a.rs", &format!("{line}\n")), 0, "{line}");
        }
    }

    #[test]
    fn only_what_is_listed_is_checked() {
        let listed = ["vfs/", "docs/protocol.md"];
        assert!(is_rewritten("vfs/src/lib.rs", &listed) && is_rewritten("docs/protocol.md", &listed));
        assert!(!is_rewritten("vfs.md", &listed) && !is_rewritten("docs/protocol.md.old", &listed));
    }
}
