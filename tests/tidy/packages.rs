//! The package table of `ARCHITECTURE.md` against what cargo knows: which package may use which.

use cargo_metadata::{DependencyKind, Metadata};
use std::collections::{BTreeMap, BTreeSet};

/// Licences under which a dependency may come. Their only condition for shipping a binary is that it names the
/// author.
const LICENCES: [&str; 10] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// A package of the workspace as a table or cargo describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Package {
    /// Folder from the root, with a slash at the end; `src/` for the root package.
    pub folder: String,
    /// Packages of the workspace that it uses, or may use.
    pub uses: BTreeSet<String>,
}

/// The rows of the table, by package name. `all` holds the names of all packages, for rows that say "all but".
pub fn parse_table(text: &str, all: &BTreeSet<String>) -> BTreeMap<String, Package> {
    let mut table = BTreeMap::new();
    let rows = text.lines().skip_while(|l| !l.starts_with("| package |")).skip(2);
    for row in rows.take_while(|l| l.starts_with('|')) {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [first, _, uses] = cells[..] else { continue };
        let folder = first.split('`').nth(1).unwrap_or_default().to_string();
        let name = match folder.as_str() {
            "src/" => "hearth",
            _ => folder.trim_end_matches('/').rsplit('/').next().unwrap_or_default(),
        };
        let listed = |text: &str| -> BTreeSet<String> {
            text.split([',', ' ']).filter(|w| !w.is_empty() && *w != "-").map(str::to_string).collect()
        };
        let uses = match uses.strip_prefix("all but") {
            Some(except) => {
                all.iter().filter(|n| !listed(except).contains(*n) && *n != name).cloned().collect()
            }
            None => listed(uses),
        };
        table.insert(name.to_string(), Package { folder, uses });
    }
    table
}

/// The packages of the workspace as they are; dependencies of tests count like any other.
pub fn packages_of(metadata: &Metadata) -> BTreeMap<String, Package> {
    let root = metadata.workspace_root.clone();
    let members = metadata.workspace_packages();
    let names: BTreeSet<String> = members.iter().map(|p| p.name.to_string()).collect();
    let describe = |package: &&cargo_metadata::Package| {
        let folder = package.manifest_path.parent().expect("a manifest lies in a folder");
        let folder = folder.strip_prefix(&root).expect("a member lies in the workspace").to_string();
        let folder = if folder.is_empty() { "src/".to_string() } else { folder + "/" };
        let uses =
            package.dependencies.iter().map(|d| d.name.clone()).filter(|n| names.contains(n)).collect();
        (package.name.to_string(), Package { folder, uses })
    };
    members.iter().map(describe).collect()
}

/// The differences between table and packages.
pub fn compare(table: &BTreeMap<String, Package>, packages: &BTreeMap<String, Package>) -> Vec<String> {
    let mut found = Vec::new();
    for name in table.keys().filter(|n| !packages.contains_key(*n)) {
        found.push(format!(
            "ARCHITECTURE.md names package {name}, which is not there: docs describe the present"
        ));
    }
    for (name, package) in packages {
        let Some(row) = table.get(name) else {
            found.push(format!("package {name} is not in ARCHITECTURE.md: nobody would know what it is for"));
            continue;
        };
        if row.folder != package.folder {
            found
                .push(format!("ARCHITECTURE.md has {name} in {}, it lies in {}", row.folder, package.folder));
        }
        for other in package.uses.difference(&row.uses) {
            found.push(format!(
                "package {name} uses {other}, which ARCHITECTURE.md does not allow: layers that call upwards \
                 cannot be tested or replaced one at a time"
            ));
        }
        for other in row.uses.iter().filter(|o| !packages.contains_key(*o)) {
            found.push(format!("ARCHITECTURE.md lets {name} use {other}, which is not there"));
        }
    }
    found
}

/// Manifests: a dependency from outside is named once, in the root, with its justification in the line above.
pub fn check_manifest(path: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut section = String::new();
    let mut before = "";
    let mut justified = String::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']).to_string();
        } else if line.contains('=') && !line.starts_with('#') && section.ends_with("dependencies") {
            let name = line.split(['=', '.']).next().unwrap_or_default().trim();
            let in_root = section == "workspace.dependencies";
            // One line justifies a crate and those named after it: `serde`, `serde_json`.
            let goes_with = |first: &String| !first.is_empty() && name.starts_with(first.as_str());
            if before.starts_with('#') {
                justified = name.to_string();
            } else if in_root && !line.contains("path =") && !goes_with(&justified) {
                found.push(format!("{path}: {name} has no line that says what it is for: each is a debt"));
            }
            if !in_root && !line.contains("workspace = true") {
                found.push(format!("{path}: {name} is not taken from the workspace: one version, one place"));
            }
        }
        before = line;
    }
    found
}

/// Dependencies that come under none of [`LICENCES`].
pub fn check_licences(metadata: &Metadata) -> Vec<String> {
    let members: BTreeSet<_> = metadata.workspace_members.iter().collect();
    let others = metadata.packages.iter().filter(|p| !members.contains(&p.id));
    others
        .filter(|p| !licence_allowed(p.license.as_deref().unwrap_or_default()))
        .map(|p| {
            format!("{} {} comes under `{:?}`: not in the list of licences", p.name, p.version, p.license)
        })
        .collect()
}

/// True if each part of a licence expression offers an allowed licence. Read strictly: an `OR` of which one side
/// is an `AND` may be refused though it should pass, never the other way round.
fn licence_allowed(expression: &str) -> bool {
    let plain = expression.replace(['(', ')'], "").replace('/', " OR ");
    plain.split(" AND ").all(|part| part.split(" OR ").any(|one| LICENCES.contains(&one.trim())))
}

/// The workspace as cargo describes it, with all dependencies of this kind of machine.
pub fn metadata(root: &std::path::Path) -> Metadata {
    let mut command = cargo_metadata::MetadataCommand::new();
    command.manifest_path(root.join("Cargo.toml"));
    command.other_options(vec!["--locked".into(), "--filter-platform=x86_64-unknown-linux-gnu".into()]);
    let metadata = command.exec().expect("cargo describes the workspace");
    let builds =
        |p: &cargo_metadata::Package| p.dependencies.iter().any(|d| d.kind == DependencyKind::Normal);
    assert!(metadata.packages.iter().any(builds), "cargo listed no dependency at all");
    metadata
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|n| n.to_string()).collect()
    }

    const TABLE: &str = "x\n| package | in one line | may use |\n| --- | --- | --- |\n\
        | `src/` (program `hearth`) | a | all but sim |\n| `low/format/` | b | - |\n| `low/pmem/` | c | format |\n\
        | `sim/` | d | format, pmem |\n\nend\n";

    fn packages() -> BTreeMap<String, Package> {
        parse_table(TABLE, &set(&["hearth", "format", "pmem", "sim"]))
    }

    #[test]
    fn the_table_is_read() {
        let table = packages();
        assert_eq!(table["hearth"], Package { folder: "src/".into(), uses: set(&["format", "pmem"]) });
        assert_eq!(table["pmem"], Package { folder: "low/pmem/".into(), uses: set(&["format"]) });
        assert_eq!(table["format"].uses, set(&[]));
    }

    #[test]
    fn each_difference_is_found() {
        let table = packages();
        assert!(compare(&table, &packages()).is_empty());
        let mut upwards = packages();
        upwards.get_mut("format").unwrap().uses.insert("pmem".into());
        assert_eq!(compare(&table, &upwards).len(), 1, "a use that is not allowed");
        let mut moved = packages();
        moved.get_mut("pmem").unwrap().folder = "pmem/".into();
        assert_eq!(compare(&table, &moved).len(), 1, "another folder");
        let mut more = packages();
        more.insert("new".into(), Package { folder: "new/".into(), uses: set(&[]) });
        assert_eq!(compare(&table, &more).len(), 1, "a package without a row");
        let mut fewer = packages();
        fewer.remove("sim");
        assert_eq!(compare(&table, &fewer).len(), 1, "a row without a package");
    }

    #[test]
    fn manifests_and_licences_can_fail() {
        let root = "[workspace.dependencies]\na = { path = \"a\" }\n# Why.\nb = \"1\"\n";
        assert!(check_manifest("Cargo.toml", root).is_empty());
        assert_eq!(check_manifest("Cargo.toml", &root.replace("# Why.\n", "")).len(), 1);
        assert_eq!(check_manifest("Cargo.toml", &format!("{root}b_more = \"1\"\nc = \"1\"\n")).len(), 1);
        assert!(check_manifest("a/Cargo.toml", "[dev-dependencies]\nb.workspace = true\n").is_empty());
        assert_eq!(check_manifest("a/Cargo.toml", "[dev-dependencies]\nb = \"2\"\n").len(), 1);
        assert!(licence_allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(licence_allowed("GPL-3.0 OR MIT") && licence_allowed("Unlicense/MIT"));
        assert!(!licence_allowed("(MIT OR Zlib) AND GPL-3.0") && !licence_allowed(""));
    }
}
