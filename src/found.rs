//! A cluster whose `hearth.toml` cannot be understood, as its folders and its processes tell of it: enough to see how its nodes
//! are, and to end them. Places outside of the cluster's folder come from the file, as far as it can be read.

use crate::cluster::{Cluster, MediumKind, Node, Settings, pool_within, socket_path};
use crate::limits::Limits;
use crate::process::{Process, mapped_below};
use crate::settings::WrittenNode;
use std::fs;
use std::path::{Path, PathBuf};

/// Where pools in memory lie that are not in their cluster's folder.
const POOLS_ELSEWHERE: &str = "/dev/shm/hearth-";

/// The cluster in a folder, whose capacity 0 is not known; none if no node has a folder there.
pub fn cluster(dir: &Path, text: &str) -> Option<Cluster> {
    let dir = dir.canonicalize().ok()?;
    let written = toml::from_str::<toml::Table>(text).unwrap_or_default();
    let names = fs::read_dir(&dir).ok()?.flatten().map(|entry| entry.file_name());
    let mut numbers: Vec<u32> =
        names.filter_map(|name| name.to_str()?.strip_prefix("node-")?.parse().ok()).collect();
    numbers.sort_unstable();
    let nodes: Vec<Node> = numbers.into_iter().map(|number| node(&dir, number, &written)).collect();
    if nodes.is_empty() {
        return None;
    }
    let medium = written.get("medium").and_then(|medium| medium.clone().try_into().ok());
    let medium = medium.unwrap_or(MediumKind::File);
    let settings =
        Settings { medium, capacity_bytes: 0, mount: true, limits: Limits::default(), chain: None, nodes };
    Some(Cluster { dir, settings })
}

fn node(dir: &Path, number: u32, written: &toml::Table) -> Node {
    let folder = dir.join(format!("node-{number}"));
    let node = WrittenNode::of_table(number, written).and_then(|node| node.node(dir).ok());
    node.unwrap_or_else(|| Node { number, pool: pool(&folder), socket: socket_path(&folder) })
}

/// The pool of a node: in its folder, or where its daemon has it.
fn pool(folder: &Path) -> PathBuf {
    let here = pool_within(folder);
    if here.exists() {
        return here;
    }
    let daemon = Process::load(&folder.join("serve.pid"));
    let file = daemon.and_then(|daemon| mapped_below(daemon.raw(), POOLS_ELSEWHERE));
    file.as_deref().and_then(Path::parent).map_or(here, Path::to_owned)
}
