//! Walks through the kernel's tree and the mount, for paths that cross between the two.

use crate::descriptors;
use crate::kernel_links;
use crate::mount::{Errno, MountPath, Target};
use crate::paths::{PATH_BYTES_MAX, below, components, magic, path_of};
use crate::start::{Site, site};
use std::ffi::CString;

const LINKS_MAX: usize = 40;

/// The end of a walk: an absolute path without links and `..`, except for the end of the path of a call on a name.
pub enum Walked {
    /// The part below the prefix.
    Mount(Vec<u8>),
    /// A path outside of the mount.
    Kernel(CString),
}

impl Walked {
    /// The part below the prefix.
    pub fn in_mount(&self) -> Option<&[u8]> {
        match self {
            Self::Mount(path) => Some(path),
            Self::Kernel(_) => None,
        }
    }
}

/// How a walk treats the end of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Follows a symbolic link.
    Follow,
    /// Does not follow a symbolic link, unless slashes follow its name.
    Itself,
    /// Does not follow a symbolic link, because the call makes, removes or renames the name.
    Entry,
}

/// Walks an absolute path component by component, through the kernel's tree and the mount.
pub fn walk(path: &[u8], end: End) -> Result<Walked, Errno> {
    walk_by(path, end).map(|(walked, _)| walked)
}

/// The same, and whether the way led through the mount.
pub fn walk_by(path: &[u8], end: End) -> Result<(Walked, bool), Errno> {
    let site = site().ok_or(Errno(libc::EIO))?;
    let (path, rest) = if end == End::Entry { split_end(path) } else { (path, [].as_slice()) };
    let mut through_mount = false;
    let mut done: Vec<u8> = Vec::new();
    let mut todo: Vec<Vec<u8>> = components(path).rev().map(<[u8]>::to_vec).collect();
    let mut directory = path.ends_with(b"/") || path.ends_with(b"/.");
    let mut links = 0;
    while let Some(part) = todo.pop() {
        if part == b".." {
            search(site, &done)?;
            let cut = done.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
            done.truncate(cut);
            continue;
        }
        let parent = done.len();
        done.push(b'/');
        done.extend_from_slice(&part);
        if done.len() >= PATH_BYTES_MAX {
            return Err(Errno(libc::ENAMETOOLONG));
        }
        through_mount |= below(site, &done).is_some();
        let last = todo.is_empty() && !directory;
        if last && end != End::Follow {
            break;
        }
        let Some(target) = link_at(site, &done, last)? else { continue };
        links += 1;
        if links > LINKS_MAX {
            return Err(Errno(libc::ELOOP));
        }
        done.truncate(if target.first() == Some(&b'/') { 0 } else { parent });
        directory |= todo.is_empty() && target.ends_with(b"/");
        todo.extend(components(&target).rev().map(<[u8]>::to_vec));
    }
    if directory || done.is_empty() {
        done.push(b'/');
    }
    done.extend_from_slice(rest);
    if let Some(rest) = below(site, &done) {
        return Ok((Walked::Mount(rest.to_vec()), true));
    }
    let path = CString::new(done).map_err(|_| Errno(libc::EINVAL))?;
    Ok((Walked::Kernel(path), through_mount))
}

/// Checks that an absolute path leads to a directory that the user may search, as a `..` after it requires.
fn search(site: &Site, path: &[u8]) -> Result<(), Errno> {
    let path = [path, b"/."].concat();
    match below(site, &path) {
        Some(rest) => {
            site.mount.attributes(Target::Named(MountPath { dir: None, path: rest }, true)).map(|_| ())
        }
        None => kernel_links::exists(path),
    }
}

/// Splits what a call on a name does not walk off the path: the slashes after the name, or `.` or `..` in its place.
fn split_end(path: &[u8]) -> (&[u8], &[u8]) {
    let slashes = path.iter().rev().take_while(|byte| **byte == b'/').count();
    let whole = &path[..path.len() - slashes];
    let name = whole.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
    let at = if matches!(&whole[name..], b"." | b"..") { name } else { whole.len() };
    path.split_at(at)
}

/// The target of the link at an absolute path that has no links before its end; `None` if there is no link. `last`: the
/// link is the end of the path.
fn link_at(site: &Site, path: &[u8], last: bool) -> Result<Option<Vec<u8>>, Errno> {
    if let Some((fd, _)) = magic(path) {
        return descriptors::get(fd).and_then(|held| path_of(&held)).map(Some);
    }
    let target = match below(site, path) {
        Some([]) => return Ok(None),
        Some(rest) => site.mount.readlink(MountPath { dir: None, path: rest }),
        None => kernel_links::target(path).and_then(|target| {
            if last { kernel_links::may_follow(path).map(|()| target) } else { Ok(target) }
        }),
    };
    match target {
        Ok(target) => Ok(Some(target)),
        Err(Errno(libc::EACCES | libc::EIO | libc::ELOOP)) => target.map(Some),
        Err(_) => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::split_end;

    #[test]
    fn the_end_of_a_path_of_a_call_on_a_name() {
        let split = |path: &'static str| {
            let (walked, rest) = split_end(path.as_bytes());
            (String::from_utf8_lossy(walked).into_owned(), String::from_utf8_lossy(rest).into_owned())
        };
        let is = |walked: &str, rest: &str| (walked.to_owned(), rest.to_owned());
        assert_eq!(split("/a/b"), is("/a/b", ""));
        assert_eq!(split("/a/b//"), is("/a/b", "//"));
        assert_eq!(split("/a/b/.."), is("/a/b/", ".."));
        assert_eq!(split("/a/./"), is("/a/", "./"));
        assert_eq!(split("/a/..b"), is("/a/..b", ""));
        assert_eq!(split("/"), is("", "/"));
    }
}
