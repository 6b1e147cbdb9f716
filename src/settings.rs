//! `hearth.toml`: the settings with which the cluster was made. Paths within the cluster's folder are not written down
//! or relative to it, so that it can be moved and copied; earlier files have them absolute, and are read as if they had
//! not. Only two things may be elsewhere: a pool in memory, and a socket whose path would be too long.
//!
//! A key or a table that is not known is refused everywhere: a setting that is misspelled would have its default instead, and a
//! node without `[chain]` would serve a tree of its own.

use crate::chain::settings::ChainSettings;
use crate::cluster::{MediumKind, Node, fingerprint, pool_within, socket_path};
use crate::error::{Error, Result};
use crate::limits::Limits;
use serde::{Deserialize, Serialize};
use std::fs;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Data that a pool may hold, in MiB: of less nothing would be left to promise, of more a daemon could not map all segments.
pub const CAPACITY_MIB: RangeInclusive<u64> = 16..=12 << 20;

/// The file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Written {
    /// Medium of all pools.
    pub medium: MediumKind,
    /// Data that a pool may hold, in bytes.
    pub capacity_bytes: u64,
    /// Whether its nodes are mounted when they start, if they may be.
    #[serde(default = "mounted_unless_chosen", skip_serializing_if = "Clone::clone")]
    pub mount: bool,
    /// Bounds, if any was chosen.
    #[serde(default, skip_serializing_if = "Limits::is_default")]
    pub limits: Limits,
    /// The settings that several nodes share.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chain: Option<ChainSettings>,
    /// The nodes.
    pub nodes: Vec<WrittenNode>,
}

fn mounted_unless_chosen() -> bool {
    true
}

impl Written {
    /// Reads the text of the file, and refuses settings that cannot work.
    ///
    /// # Errors
    /// The file with the line and the reason; for a key that is not known also the nearest one that is.
    pub fn parse(file: &Path, text: &str) -> Result<Self> {
        let written: Self = toml::from_str(text).map_err(|why| {
            let line = why.span().map(|span| line_of(text, span.start));
            let at = line.map_or_else(String::new, |line| format!("line {line}: "));
            let why = why.message();
            let nearest = nearest_known(why).map(|name| format!("; the nearest known name is `{name}`"));
            Error::new(format!(
                "cannot understand {}: {at}{why}{}",
                file.display(),
                nearest.unwrap_or_default()
            ))
        })?;
        written.check()?;
        Ok(written)
    }

    fn check(&self) -> Result<()> {
        self.limits.check()?;
        let (least, most) = (CAPACITY_MIB.start() << 20, CAPACITY_MIB.end() << 20);
        if !(least..=most).contains(&self.capacity_bytes) {
            return Err(Error::new(format!(
                "hearth.toml: capacity_bytes = {} is not between {least} and {most}",
                self.capacity_bytes
            )));
        }
        let mut numbers: Vec<u32> = self.nodes.iter().map(|node| node.number).collect();
        numbers.sort_unstable();
        if !numbers.iter().copied().eq((1..).take(numbers.len())) {
            let numbers: Vec<String> = numbers.iter().map(u32::to_string).collect();
            return Err(Error::new(format!(
                "hearth.toml: the tables [[nodes]] have the numbers {}, and not those from 1 on",
                numbers.join(", ")
            )));
        }
        let nodes = self.nodes.len();
        match &self.chain {
            Some(chain) => chain.check().and_then(|()| chain.check_nodes(nodes)),
            None if nodes > 1 => Err(Error::new(format!(
                "hearth.toml: the cluster has {nodes} nodes and no [chain]: each node would serve a tree of its own; put the \
                 table [chain] with [chain.pools] back"
            ))),
            None => Ok(()),
        }
    }
}

/// The number of the line, from 1, in which a byte of a text stands.
fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}

/// The name that is most like the unknown one, of a message of serde: the first name in it is unknown, the others are known.
fn nearest_known(message: &str) -> Option<&str> {
    let mut names = message.strip_prefix("unknown field ")?.split('`').skip(1).step_by(2);
    let unknown = names.next()?;
    let like = |name: &str| strsim::normalized_damerau_levenshtein(unknown, name);
    let nearest = names.max_by(|a, b| like(a).total_cmp(&like(b)))?;
    (like(nearest) >= 0.5).then_some(nearest)
}

/// One node.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WrittenNode {
    number: u32,
    pool: PathBuf,
    /// For a pool elsewhere: the node's folder for which it was made, which is another one in a copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    made_for: Option<Identity>,
    /// Only if it lies elsewhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<PathBuf>,
}

/// Tells a folder from a copy of it, and stays when it is moved.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    fn of(folder: &Path) -> Result<Self> {
        let found = fs::metadata(folder).map_err(Error::at("look at", folder))?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }
}

impl WrittenNode {
    /// How a node is written down.
    ///
    /// # Errors
    /// Its folder cannot be looked at.
    pub fn of(dir: &Path, node: &Node) -> Result<Self> {
        let folder = dir.join(format!("node-{}", node.number));
        let within = node.pool.strip_prefix(dir);
        let elsewhere = within.is_err().then(|| Identity::of(&folder)).transpose()?;
        Ok(Self {
            number: node.number,
            pool: within.unwrap_or(&node.pool).to_owned(),
            made_for: elsewhere,
            socket: (!node.socket.starts_with(dir)).then(|| node.socket.clone()),
        })
    }

    /// As much of it as a file tells that is not right otherwise.
    pub fn of_table(number: u32, written: &toml::Table) -> Option<Self> {
        let nodes = written.get("nodes")?.as_array()?;
        let has_number =
            |node: &&toml::Value| node.get("number").and_then(toml::Value::as_integer) == Some(number.into());
        let node = nodes.iter().find(has_number)?;
        let path = |key: &str| node.get(key).and_then(toml::Value::as_str).map(PathBuf::from);
        let made_for = node.get("made_for").and_then(|made_for| made_for.clone().try_into().ok());
        Some(Self { number, pool: path("pool")?, made_for, socket: path("socket") })
    }

    /// The node in a folder that may have been moved or copied since.
    ///
    /// # Errors
    /// Its pool is another cluster's.
    pub fn node(&self, dir: &Path) -> Result<Node> {
        let folder = dir.join(format!("node-{}", self.number));
        Ok(Node { number: self.number, pool: self.pool(dir, &folder)?, socket: self.socket(&folder) })
    }

    fn pool(&self, dir: &Path, folder: &Path) -> Result<PathBuf> {
        if self.pool.is_relative() {
            return Ok(dir.join(&self.pool));
        }
        let here = pool_within(folder);
        if self.pool.ends_with(here.strip_prefix(dir).unwrap_or(&here)) {
            return Ok(here);
        }
        // If it is gone, that is the error to report.
        if !self.pool.exists() {
            return Ok(self.pool.clone());
        }
        let own = match &self.made_for {
            Some(identity) => *identity == Identity::of(folder)?,
            None => named_for(&self.pool, folder),
        };
        if own {
            return Ok(self.pool.clone());
        }
        Err(Error::new(format!(
            "{} is a copy of a cluster whose pool in memory was not copied with it: {} is the original's (what was \
             moved here from another file system has to go back there; a copy can be removed)",
            dir.display(),
            self.pool.display()
        )))
    }

    fn socket(&self, folder: &Path) -> PathBuf {
        let elsewhere = self.socket.as_deref().filter(|socket| {
            socket.is_absolute() && socket.parent().is_some_and(|private| named_for(private, folder))
        });
        elsewhere.map_or_else(|| socket_path(folder), Path::to_owned)
    }
}

/// Whether a folder elsewhere has its name from a node's folder.
fn named_for(elsewhere: &Path, folder: &Path) -> bool {
    let end = format!("-{:016x}", fingerprint(folder));
    elsewhere.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.ends_with(&end))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str =
        "medium = \"file\"\ncapacity_bytes = 67108864\n[[nodes]]\nnumber = 1\npool = \"node-1/pool\"\n";
    const CHAIN: &str = "[chain]\nfounder = 1\nmin_copies = 2\n[chain.pools]\ntree_nodes_max = 4096\nroot_mode = 493\n\
                         root_uid = 0\nroot_gid = 0\ntime_ns = 1\nledger_bytes = 1048576\n";
    const ANOTHER: &str = "[[nodes]]\nnumber = 2\npool = \"node-2/pool\"\n";

    fn refused(text: &str) -> String {
        Written::parse(Path::new("/d/hearth.toml"), text).expect_err(text).to_string()
    }

    #[test]
    fn an_unknown_name_is_refused_in_every_table_with_its_line_and_the_nearest_one() {
        let whole =
            format!("{ONE}made_for = {{ device = 1, inode = 2 }}\n{ANOTHER}{CHAIN}[limits]\nleases = 128\n");
        assert!(Written::parse(Path::new("/d/hearth.toml"), &whole).is_ok());
        let names = [
            ("capacity_bytes", "capacity_byte"),
            ("made_for", "madefor"),
            ("device", "devise"),
            ("[chain", "[chian"),
            ("min_copies", "min_copeis"),
            ("[chain.pools]", "[chain.pool]"),
            ("root_mode", "rot_mode"),
            ("[limits]", "[limit]"),
            ("leases", "lease"),
            ("pool =", "pol ="),
        ];
        for (name, misspelled) in names {
            let why = refused(&whole.replace(name, misspelled));
            let line = line_of(&whole, whole.find(name).unwrap());
            let bare =
                |name: &str| name.trim_matches(['[', ']', '=', ' ']).rsplit('.').next().unwrap().to_owned();
            let parts = [
                format!("/d/hearth.toml: line {line}: "),
                format!("unknown field `{}`", bare(misspelled)),
                format!("the nearest known name is `{}`", bare(name)),
            ];
            assert!(parts.iter().all(|part| why.contains(part)), "{misspelled}: {why}");
        }
        assert!(!refused(&format!("zzz = 1\n{whole}")).contains("nearest"));
        assert!(refused(&whole.replacen("number", "numer ber", 1)).contains("line 4: "), "no name at all");
    }

    #[test]
    fn several_nodes_have_a_chain_and_every_pool_a_capacity() {
        assert!(Written::parse(Path::new("f"), ONE).is_ok());
        assert!(refused(&format!("{ONE}{ANOTHER}")).contains("2 nodes and no [chain]"));
        for capacity in ["0", "16777215", "13194139533313"] {
            let why = refused(&ONE.replace("67108864", capacity));
            assert!(why.contains(&format!("capacity_bytes = {capacity} is not between")), "{why}");
        }
    }
}
