//! Trees as a process sees them, to be compared.

use super::Node;
use std::collections::BTreeMap;
use std::sync::Arc;
use vfs::conformance::{Actor, Answer, Call, Path, Player};
use vfs::engine::LockOwner;

/// A path from the root.
pub fn at(path: &str) -> Path {
    Path { base: None, path: path.to_owned() }
}

/// A process of root's.
pub fn process<E: vfs::Engine>(engine: Arc<E>, id: u64) -> Player<E> {
    Player::with_owner(engine, LockOwner::Process { id, pid: id as u32 }).expect("the tree has a root")
}

/// The answers that a process gets at each path.
pub type Tree = BTreeMap<String, Vec<Answer>>;

/// All names, types, attributes and contents, as root sees them.
pub fn whole_tree(actor: &mut dyn Actor) -> Tree {
    actor.call(&Call::User { uid: 0, gid: 0, groups: Vec::new() });
    let mut seen = Tree::new();
    below(actor, "", &mut seen);
    seen
}

fn below(actor: &mut dyn Actor, path: &str, seen: &mut Tree) {
    let here = if path.is_empty() { "." } else { path };
    let stat = actor.call(&Call::Stat { path: at(here), follow: false });
    let mut answers = vec![stat.clone(), actor.call(&Call::ListXattrs(at(here)))];
    match stat {
        Answer::Stat(found) if found.mode >> 12 == 0o04 => {
            let list = actor.call(&Call::List(at(here)));
            if let Answer::Names(names) = &list {
                // Each with its type behind a colon.
                let names = names.iter().filter_map(|name| name.split_once(':'));
                for (name, _) in names.filter(|(name, _)| !matches!(*name, "." | "..")) {
                    let path = if path.is_empty() { name.to_owned() } else { format!("{path}/{name}") };
                    below(actor, &path, seen);
                }
            }
            answers.push(list);
        }
        Answer::Stat(found) if found.mode >> 12 == 0o10 => {
            actor.call(&Call::Open { slot: 9, path: at(here), flags: 0, mode: 0 });
            answers.push(actor.call(&Call::Pread { slot: 9, offset: 0, bytes: 1 << 20 }));
            actor.call(&Call::Close(9));
        }
        _ => answers.push(actor.call(&Call::Readlink(at(here)))),
    }
    seen.insert(here.to_owned(), answers);
}

impl Node {
    /// Digests everything, removes what has no name, and sees that no session was cut.
    pub fn tidy(&self) {
        let daemon = self.daemon().expect("it runs");
        daemon.tidy();
        assert!(daemon.terminations().is_empty(), "an honest LibFS was cut: {:?}", daemon.terminations());
    }
}
