//! Holds the whole tree to the rules of form that can be a test. Every finding says what is wrong, where, and why
//! the rule stands; each rule is shown to fail by a test beside it.

#![forbid(unsafe_code)]

#[path = "tidy/documents.rs"]
mod documents;
#[path = "tidy/language.rs"]
mod language;
#[path = "tidy/layouts.rs"]
mod layouts;
#[path = "tidy/packages.rs"]
mod packages;
#[path = "tidy/rules.rs"]
mod rules;
#[path = "tidy/source.rs"]
mod source;

use rules::File;
use std::path::Path;

/// Folders that hold nothing written by hand.
const SKIPPED: [&str; 5] = [".git", "target", "artifacts", "corpus", "seeds"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All text files of the tree.
fn tree() -> Vec<File> {
    let mut files = Vec::new();
    let mut folders = vec![root().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("the tree can be read") {
            let path = entry.expect("the tree can be read").path();
            let name = path.file_name().expect("an entry has a name").to_string_lossy().to_string();
            if path.is_dir() {
                if !SKIPPED.contains(&name.as_str()) {
                    folders.push(path);
                }
            } else if name == ".git" {
                // A work tree's link to its repository.
            } else if let Ok(text) = std::fs::read_to_string(&path)
                && name != "Cargo.lock"
            {
                let path = path.strip_prefix(root()).expect("a file of the tree lies in it");
                files.push(File { path: path.to_string_lossy().to_string(), text });
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn none(found: Vec<String>) {
    assert!(found.is_empty(), "{} findings:\n{}", found.len(), found.join("\n"));
}

#[test]
fn every_file_is_plain_text() {
    none(tree().iter().flat_map(rules::check_text).collect());
}

#[test]
fn every_source_keeps_the_rules() {
    none(tree().iter().filter(|f| f.is_rust()).flat_map(rules::check_rust).collect());
}

#[test]
fn rewritten_packages_are_in_plain_english() {
    let tree = tree();
    for entry in language::REWRITTEN {
        assert!(tree.iter().any(|f| language::is_rewritten(&f.path, &[entry])), "{entry} holds no file");
    }
    // Set to a path, to see what is left to do there.
    let chosen = std::env::var("HEARTH_LANGUAGE").ok();
    let listed = chosen.as_deref().map_or(language::REWRITTEN.to_vec(), |path| vec![path]);
    none(
        tree.iter().filter(|f| language::is_rewritten(&f.path, &listed)).flat_map(language::check).collect(),
    );
}

#[test]
fn crate_roots_forbid_unsafe_code() {
    let is_root = |f: &&File| f.path.ends_with("src/lib.rs") || f.path.ends_with("src/main.rs");
    none(tree().iter().filter(is_root).flat_map(rules::check_crate_root).collect());
}

#[test]
fn packages_use_what_the_table_allows() {
    let metadata = packages::metadata(root());
    let actual = packages::packages_of(&metadata);
    let table = packages::parse_table(&read("ARCHITECTURE.md"), &actual.keys().cloned().collect());
    none(packages::compare(&table, &actual));
    none(packages::check_licences(&metadata));
}

#[test]
fn dependencies_are_named_once_and_justified() {
    let tree = tree();
    let manifests = tree.iter().filter(|f| f.path.ends_with("Cargo.toml") && !f.path.starts_with("fuzz/"));
    none(manifests.flat_map(|f| packages::check_manifest(&f.path, &f.text)).collect());
}

#[test]
fn the_document_of_the_formats_shows_the_formats() {
    let tree = tree();
    let sources: Vec<&File> = tree.iter().filter(|f| f.path.starts_with("substrate/format/src/")).collect();
    let module_name =
        |f: &File| f.path.rsplit('/').next().unwrap_or_default().trim_end_matches(".rs").to_string();
    let modules: Vec<_> = sources.iter().map(|f| (module_name(f), layouts::Module::parse(&f.text))).collect();
    let mut sizes = layouts::Sizes::default();
    // A structure may stand in one of another module: as many rounds as there are modules find every size.
    for _ in &modules {
        modules.iter().for_each(|(_, module)| module.measure(&mut sizes));
    }
    let rendered =
        |(name, module): &(String, layouts::Module)| module.render(&sizes).map(|t| (name.clone(), t));
    let tables: Vec<_> =
        modules.iter().map(rendered).collect::<Result<_, _>>().unwrap_or_else(|e| panic!("{e}"));
    let path = root().join("docs/media-format.md");
    let document = read("docs/media-format.md");
    if std::env::var_os("HEARTH_WRITE_DOCS").is_some() {
        std::fs::write(&path, layouts::rewrite(&document, &tables)).expect("the document can be written");
        return;
    }
    none(layouts::compare(&document, &tables));
}

#[test]
fn links_and_commands_of_documents_exist() {
    let tree = tree();
    let makefile = read("Makefile");
    let documents = || tree.iter().filter(|f| f.path.ends_with(".md"));
    none(documents().flat_map(|f| documents::check_links(f, &tree)).collect());
    none(documents().flat_map(|f| documents::check_make_targets(f, &makefile)).collect());
}

#[test]
fn every_decoder_is_fuzzed() {
    let tree = tree();
    let format: Vec<&File> = tree.iter().filter(|f| f.path.starts_with("substrate/format/src/")).collect();
    assert!(format.len() > 5, "the sources of format are not where they were");
    none(documents::check_fuzz_targets(&format, &read("fuzz/Cargo.toml")));
}
