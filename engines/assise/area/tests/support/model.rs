//! The naive model: a map of inodes, changed as POSIX says, with none of the area's machinery.

use super::{ALICE, AreaState, At, Inode, Op, Step, mode_of, time_of};
use format::record::{FileType, SET_ATIME, SET_GID, SET_MODE, SET_MTIME, SET_UID};

/// The record contradicts the state.
#[derive(Debug, PartialEq, Eq)]
pub struct Contradiction;

type Outcome = Result<(), Contradiction>;

/// The state of a new pool.
pub fn new() -> AreaState {
    let root = Inode {
        mode: FileType::Directory.mode_bits() | 0o755,
        links: 2,
        atime_ns: 5,
        mtime_ns: 5,
        ctime_ns: 5,
        btime_ns: 5,
        parent: 1,
        ..Inode::default()
    };
    AreaState::from([(1, root)])
}

fn is(inode: &Inode, file_type: FileType) -> bool {
    FileType::of_mode(inode.mode) == Some(file_type)
}

fn need(condition: bool) -> Outcome {
    if condition { Ok(()) } else { Err(Contradiction) }
}

fn get(state: &AreaState, inode: u64) -> Result<&Inode, Contradiction> {
    state.get(&inode).ok_or(Contradiction)
}

fn get_mut(state: &mut AreaState, inode: u64) -> &mut Inode {
    state.get_mut(&inode).expect("it was looked up before")
}

/// A name that can be added.
fn need_free(state: &AreaState, at: &At) -> Outcome {
    let parent = get(state, at.parent)?;
    need(is(parent, FileType::Directory) && parent.links > 0)?;
    let taken = |(name, (_, cookie, _)): (&Vec<u8>, &(u64, u64, u8))| {
        *name == at.name || *cookie == at.cookie().get()
    };
    need(!parent.entries.iter().any(taken))
}

/// A name that stands for this inode.
fn need_entry(state: &AreaState, at: &At, inode: u64) -> Outcome {
    let entry = get(state, at.parent)?.entries.get(&at.name).ok_or(Contradiction)?;
    need(entry.0 == inode && entry.1 == at.cookie().get())
}

fn is_below(state: &AreaState, above: u64, mut at: u64) -> bool {
    while at != 1 {
        if at == above {
            return true;
        }
        at = state[&at].parent;
    }
    above == 1
}

fn need_removable(state: &AreaState, inode: u64, directory: bool) -> Outcome {
    let found = get(state, inode)?;
    need(inode != 1 && is(found, FileType::Directory) == directory && found.entries.is_empty())
}

fn add_entry(state: &mut AreaState, at: &At, inode: u64, time_ns: i64) {
    let file_type = FileType::of_mode(state[&inode].mode).expect("inodes have a type");
    let directory = file_type == FileType::Directory;
    if directory {
        get_mut(state, inode).parent = at.parent;
    }
    let parent = get_mut(state, at.parent);
    parent.entries.insert(at.name.clone(), (inode, at.cookie().get(), file_type as u8));
    changed(parent, time_ns);
    sync_directory(state, at.parent);
}

fn remove_entry(state: &mut AreaState, at: &At, time_ns: i64) {
    let parent = get_mut(state, at.parent);
    parent.entries.remove(&at.name);
    changed(parent, time_ns);
    sync_directory(state, at.parent);
}

fn sync_directory(state: &mut AreaState, directory: u64) {
    let found = get_mut(state, directory);
    let below = found.entries.values().filter(|entry| entry.2 == FileType::Directory as u8).count();
    found.size = found.entries.len() as u64;
    found.links = 2 + below as u32;
}

fn changed(inode: &mut Inode, time_ns: i64) {
    (inode.mtime_ns, inode.ctime_ns) = (time_ns, time_ns);
}

fn lose_name(state: &mut AreaState, inode: u64, keep_open: bool, time_ns: i64) {
    let found = get_mut(state, inode);
    found.links = if is(found, FileType::Directory) { 0 } else { found.links - 1 };
    found.ctime_ns = time_ns;
    if found.links == 0 {
        found.orphan = true;
        if !keep_open {
            state.remove(&inode);
        }
    }
}

/// A new inode.
fn created(mode: u32, time_ns: i64) -> Inode {
    let (uid, gid) = (ALICE, 100);
    let (atime_ns, mtime_ns, ctime_ns, btime_ns) = (time_ns, time_ns, time_ns, time_ns);
    Inode { mode, uid, gid, atime_ns, mtime_ns, ctime_ns, btime_ns, ..Inode::default() }
}

/// Applies a step as record `sequence`.
pub fn apply(state: &mut AreaState, step: &Step, sequence: u64) -> Outcome {
    let (inode, time_ns) = (step.inode, time_of(sequence));
    match &step.op {
        Op::Write { .. } | Op::Truncate { .. } | Op::Allocate { .. } => contents(state, step, time_ns),
        Op::Create { at, file_type, target } => {
            need_free(state, at)?;
            need(!state.contains_key(&inode))?;
            let directory = *file_type == FileType::Directory;
            let device = matches!(file_type, FileType::CharacterDevice | FileType::BlockDevice);
            let new = Inode {
                links: if directory { 2 } else { 1 },
                size: target.len() as u64,
                rdev: if device { 0x0103 } else { 0 },
                target: target.clone(),
                ..created(mode_of(*file_type), time_ns)
            };
            state.insert(inode, new);
            add_entry(state, at, inode, time_ns);
            Ok(())
        }
        Op::CreateUnnamed { parent, linkable } => {
            need(is(get(state, *parent)?, FileType::Directory) && !state.contains_key(&inode))?;
            let parent = if *linkable { *parent } else { 0 };
            let new = Inode { orphan: true, parent, ..created(mode_of(FileType::Regular), time_ns) };
            state.insert(inode, new);
            Ok(())
        }
        Op::Link { at } => {
            need_free(state, at)?;
            let found = get(state, inode)?;
            need(!is(found, FileType::Directory) && (found.links > 0 || found.parent != 0))?;
            add_entry(state, at, inode, time_ns);
            let found = get_mut(state, inode);
            found.links += 1;
            (found.orphan, found.parent) = (false, 0);
            found.ctime_ns = time_ns;
            Ok(())
        }
        Op::Unlink { at, directory, keep_open } => {
            need_entry(state, at, inode)?;
            need_removable(state, inode, *directory)?;
            remove_entry(state, at, time_ns);
            lose_name(state, inode, *keep_open, time_ns);
            Ok(())
        }
        Op::Rename { .. } => rename(state, step, time_ns),
        Op::SetAttr { mask, mode, uid, gid, atime_ns, mtime_ns } => {
            get(state, inode)?;
            let found = get_mut(state, inode);
            let set = |bit: u32| mask & bit != 0;
            if set(SET_MODE) {
                found.mode = (found.mode & !0o7777) | mode;
            }
            found.uid = if set(SET_UID) { *uid } else { found.uid };
            found.gid = if set(SET_GID) { *gid } else { found.gid };
            found.atime_ns = if set(SET_ATIME) { *atime_ns } else { found.atime_ns };
            found.mtime_ns = if set(SET_MTIME) { *mtime_ns } else { found.mtime_ns };
            found.ctime_ns = time_ns;
            Ok(())
        }
        Op::SetXattr { name, value } => {
            get(state, inode)?;
            let found = get_mut(state, inode);
            found.xattrs.insert(name.clone(), value.clone());
            found.ctime_ns = time_ns;
            Ok(())
        }
        Op::RemoveXattr { name } => {
            need(get(state, inode)?.xattrs.contains_key(name))?;
            let found = get_mut(state, inode);
            found.xattrs.remove(name);
            found.ctime_ns = time_ns;
            Ok(())
        }
        Op::Reap { .. } => {
            need(get(state, inode)?.orphan)?;
            state.remove(&inode);
            Ok(())
        }
    }
}

fn contents(state: &mut AreaState, step: &Step, time_ns: i64) -> Outcome {
    need(is(get(state, step.inode)?, FileType::Regular))?;
    let found = get_mut(state, step.inode);
    let contents = &mut found.contents;
    match &step.op {
        Op::Write { offset, bytes } => {
            let (start, end) = (*offset as usize, *offset as usize + bytes.len());
            if contents.len() < end && !bytes.is_empty() {
                contents.resize(end, 0);
            }
            if !bytes.is_empty() {
                contents[start..end].copy_from_slice(bytes);
            }
        }
        Op::Truncate { size } => contents.resize(*size as usize, 0),
        Op::Allocate { offset, bytes, punch_hole: true, .. } => {
            let end = (*offset + *bytes).min(contents.len() as u64);
            if *offset < end {
                contents[*offset as usize..end as usize].fill(0);
            }
        }
        Op::Allocate { offset, bytes, keep_size, punch_hole: false } => {
            let end = (*offset + *bytes) as usize;
            if !keep_size && contents.len() < end {
                contents.resize(end, 0);
            }
        }
        _ => unreachable!("not a change of contents"),
    }
    found.size = found.contents.len() as u64;
    changed(found, time_ns);
    Ok(())
}

fn rename(state: &mut AreaState, step: &Step, time_ns: i64) -> Outcome {
    let Op::Rename { old, new, replaced, exchange, keep_open, whiteout } = &step.op else {
        unreachable!("a rename")
    };
    let inode = step.inode;
    need_entry(state, old, inode)?;
    need(is(get(state, new.parent)?, FileType::Directory))?;
    let directory = is(get(state, inode)?, FileType::Directory);
    if *replaced == 0 {
        need(!exchange)?;
        need_free(state, new)?;
    } else {
        need_entry(state, new, *replaced)?;
        if !exchange && *replaced != inode {
            need_removable(state, *replaced, directory)?;
        }
    }
    need(!(directory && is_below(state, inode, new.parent)))?;
    if *exchange {
        let other = is(get(state, *replaced)?, FileType::Directory);
        need(!(other && is_below(state, *replaced, old.parent)))?;
    }
    need(*whiteout == 0 || !exchange && !state.contains_key(whiteout))?;
    if *replaced == inode {
        return Ok(());
    }
    if *exchange {
        add_entry(state, old, *replaced, time_ns);
        get_mut(state, *replaced).ctime_ns = time_ns;
    } else {
        remove_entry(state, old, time_ns);
    }
    if *whiteout != 0 {
        let mode = FileType::CharacterDevice.mode_bits();
        state.insert(*whiteout, Inode { links: 1, ..created(mode, time_ns) });
        add_entry(state, old, *whiteout, time_ns);
    }
    add_entry(state, new, inode, time_ns);
    get_mut(state, inode).ctime_ns = time_ns;
    if *replaced != 0 && !exchange {
        lose_name(state, *replaced, *keep_open, time_ns);
    }
    Ok(())
}
