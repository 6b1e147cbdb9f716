//! Documents against the tree: links lead somewhere, commands exist, each decoder is fuzzed.

use crate::rules::File;
use std::collections::BTreeSet;

/// Links of a document that lead nowhere. `exists` is asked for paths from the root of the tree, `headings` for
/// the anchors of one document.
pub fn check_links(file: &File, files: &[File]) -> Vec<String> {
    let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut found = Vec::new();
    for link in links(&file.text) {
        if link.contains("://") || link.starts_with("mailto:") {
            continue;
        }
        let (path, anchor) = link.split_once('#').unwrap_or((link, ""));
        let target = if path.is_empty() { Some(file.path.clone()) } else { resolve(folder, path) };
        let is = |f: &&File| target.as_ref() == Some(&f.path);
        let is_folder = |t: &String| files.iter().any(|f| f.path.starts_with(&format!("{t}/")));
        let right = match files.iter().find(is) {
            Some(other) => anchor.is_empty() || anchors(&other.text).contains(anchor),
            None => anchor.is_empty() && target.as_ref().is_some_and(is_folder),
        };
        if !right {
            found.push(format!("{}: the link to {link} leads nowhere", file.path));
        }
    }
    found
}

/// The targets of a document's links, without what stands in code.
fn links(text: &str) -> Vec<&str> {
    let mut in_fence = false;
    let mut found = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            in_fence = !in_fence;
        }
        let pieces = if in_fence { "" } else { line };
        found.extend(pieces.split("](").skip(1).filter_map(|rest| rest.split(')').next()));
    }
    found
}

/// A path relative to a folder, from the root of the tree; `None` if it leaves the tree.
fn resolve(folder: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
    for part in path.trim_end_matches('/').split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The link targets of a document: its headings, in the form that forges give them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|l| l.starts_with('#'));
    let keep = |c: char| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || matches!(c, '-' | '_') => Some(c.to_ascii_lowercase()),
        _ => None,
    };
    headings.map(|l| l.trim_start_matches('#').trim().chars().filter_map(keep).collect()).collect()
}

/// Targets that a document tells the reader to make, and that the Makefile does not have.
pub fn check_make_targets(file: &File, makefile: &str) -> Vec<String> {
    let has = |target: &str| makefile.lines().any(|l| l.starts_with(&format!("{target}:")));
    let mut found = Vec::new();
    for piece in file.text.split("make ").skip(1) {
        let before_is_mark = file.text[..piece.as_ptr() as usize - file.text.as_ptr() as usize - 5]
            .ends_with(['`', '\n', ' ', '$']);
        let target: String = piece.chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
        let marked = file.text.contains(&format!("`make {target}`"))
            || file.text.contains(&format!("\n    make {target}"));
        if before_is_mark && marked && !target.is_empty() && !has(&target) {
            found.push(format!("{}: names `make {target}`, which the Makefile does not have", file.path));
        }
    }
    found
}

/// Modules of `format` that decode, and have no fuzz target of their name.
pub fn check_fuzz_targets(format: &[&File], fuzz_manifest: &str) -> Vec<String> {
    let mut found = Vec::new();
    for file in format {
        let shipped = file.text.split("#[cfg(test)]").next().unwrap_or_default();
        let module = file.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs");
        let decodes =
            ["pub fn decode(", "pub fn check_", "pub fn split<"].iter().any(|d| shipped.contains(d));
        if decodes && !fuzz_manifest.contains(&format!("name = \"{module}\"")) {
            found.push(format!(
                "{}: decodes, and fuzz/ has no target `{module}`: what reads bytes of others meets every input",
                file.path
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.to_string(), text: text.to_string() }
    }

    #[test]
    fn dead_links_are_found() {
        let tree = || vec![file("docs/a.md", "# The `A` of it\n"), file("src/lib.rs", "")];
        let dead = |text: &str| check_links(&file("docs/b.md", text), &tree()).len();
        assert_eq!(dead("[a](a.md) [s](../src/) [h](a.md#the-a-of-it) [w](https://example.org/x)"), 0);
        assert_eq!(dead("[a](b/a.md)"), 1);
        assert_eq!(dead("[a](a.md#gone)"), 1);
        assert_eq!(dead("[a](../../a.md)"), 1);
        assert_eq!(dead("```\n[a](gone.md)\n```\n"), 0);
    }

    #[test]
    fn targets_that_do_not_exist_are_found() {
        let makefile = "test: build\n\ttrue\n";
        let wrong = |text: &str| check_make_targets(&file("README.md", text), makefile).len();
        assert_eq!(wrong("Run `make test`, and make sure of it.\n"), 0);
        assert_eq!(wrong("Run `make demo`.\n"), 1);
        assert_eq!(wrong("So:\n\n    make demo\n"), 1);
    }

    #[test]
    fn a_decoder_without_target_is_found() {
        let decoder = file("substrate/format/src/root.rs", "pub fn decode(bytes: &[u8])");
        let other = file("substrate/format/src/ids.rs", "pub fn next()");
        assert_eq!(check_fuzz_targets(&[&decoder, &other], "name = \"root\"").len(), 0);
        assert_eq!(check_fuzz_targets(&[&decoder, &other], "name = \"node\"").len(), 1);
    }
}
