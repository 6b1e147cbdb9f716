//! Paths from the root of the tree: of a call's arguments, and of open directories.

use super::answers::errno_of;
use crate::mount::{Errno, Result};
use format::InodeNumber;
use libfs::LibFs;
use vfs::engine::{Engine, Step};
use vfs::{Caller, Vfs};

/// A path without empty components and `.`; `..` stays, since only a walk can resolve it.
pub fn joined(base: &[u8], path: &[u8]) -> Vec<u8> {
    let parts = base.split(|byte| *byte == b'/').chain(path.split(|byte| *byte == b'/'));
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    parts.join(&b'/')
}

/// Path of a directory, from the entries of its parents.
pub fn path_of_directory(vfs: &Vfs<LibFs>, directory: InodeNumber) -> Result<Vec<u8>> {
    let engine = vfs.engine();
    let root = engine.root().map_err(errno_of)?.inode;
    let mut pins = vec![root];
    let found = climb(vfs, root, directory, &mut pins);
    engine.forget(&pins);
    found
}

fn climb(
    vfs: &Vfs<LibFs>,
    root: InodeNumber,
    from: InodeNumber,
    pins: &mut Vec<InodeNumber>,
) -> Result<Vec<u8>> {
    let (engine, caller) = (vfs.engine(), vfs.caller());
    let mut names: Vec<Vec<u8>> = Vec::new();
    let mut here = from;
    while here != root {
        let mut found = Vec::new();
        engine.walk(&caller, here, &[Step::Parent], &mut found).map_err(errno_of)?;
        let above = found.first().ok_or(Errno(libc::ENOENT))?.inode;
        pins.push(above);
        let access = vfs::engine::Access { read: true, write: false };
        // As in the kernel, this needs no right to read the parent directory.
        let (handle, _) = engine.open(&Caller::ROOT, above, access, false).map_err(errno_of)?;
        let mut name = None;
        let read = engine.readdir(handle, None, &mut |entry| {
            if entry.inode == here {
                name = Some(entry.name.bytes().to_vec());
            }
            name.is_none()
        });
        engine.close(handle);
        read.map_err(errno_of)?;
        names.push(name.ok_or(Errno(libc::ENOENT))?);
        here = above;
    }
    names.reverse();
    Ok(names.join(&b'/'))
}
