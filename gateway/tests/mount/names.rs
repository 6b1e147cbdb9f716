//! Names: folders that change while they are read, renames, many files, attributes.

use crate::{Mount, errno, eventually};
use rustix::fs::{CWD, RenameFlags, StatxFlags, XattrFlags, renameat_with, statx};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn what_stays_in_a_folder_is_listed_once_while_others_come_and_go() {
    let Some(mount) = Mount::new() else { return };
    let folder = mount.path("folder");
    fs::create_dir(&folder).unwrap();
    for number in 0..600 {
        fs::write(folder.join(format!("stays-{number}")), b"").unwrap();
    }
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut round = 0;
            while !over.load(Ordering::Relaxed) {
                round += 1;
                let name = folder.join(format!("{}-comes-and-goes", round % 100));
                fs::write(&name, b"").unwrap();
                fs::rename(&name, folder.join(format!("moved-{}", round % 70))).unwrap();
                fs::remove_file(folder.join(format!("moved-{}", round % 70))).unwrap();
            }
        });
        for _ in 0..10 {
            let mut seen: BTreeMap<String, u32> = BTreeMap::new();
            for entry in fs::read_dir(&folder).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                *seen.entry(name).or_default() += 1;
            }
            let stays: Vec<_> = seen.iter().filter(|(name, _)| name.starts_with("stays-")).collect();
            assert_eq!(stays.len(), 600);
            assert!(stays.iter().all(|(_, times)| **times == 1));
        }
        over.store(true, Ordering::Relaxed);
    });
}

/// The types of files at either end of a rename.
const ENDS: [&str; 6] = ["file", "link", "empty", "full", "absent", "hard"];

fn prepare(at: &Path, kind: &str, name: &str) {
    let path = at.join(name);
    match kind {
        "file" => fs::write(path, b"file").unwrap(),
        "link" => std::os::unix::fs::symlink("nowhere", path).unwrap(),
        "empty" => fs::create_dir(path).unwrap(),
        "full" => fs::create_dir_all(path.join("inner")).unwrap(),
        "hard" => {
            let one = at.join("hard-link");
            if !one.exists() {
                fs::write(&one, b"hard").unwrap();
            }
            fs::hard_link(one, path).unwrap();
        }
        _ => {}
    }
}

fn tell(at: &Path) -> Vec<String> {
    let kind = |name: &str| match fs::symlink_metadata(at.join(name)) {
        Ok(found) => format!("{:o} {}", found.mode() & libc::S_IFMT, found.nlink()),
        Err(_) => "absent".to_string(),
    };
    ["from/old", "to/new", "from", "to"].iter().map(|name| kind(name)).collect()
}

/// Makes all renames in a folder; returns the answers and the remaining files.
fn renames(root: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for (old, new) in ENDS.iter().flat_map(|old| ENDS.iter().map(move |new| (*old, *new))) {
        for flags in [RenameFlags::empty(), RenameFlags::NOREPLACE, RenameFlags::EXCHANGE] {
            let at = root.join("matrix");
            fs::create_dir(&at).unwrap();
            fs::create_dir(at.join("from")).unwrap();
            fs::create_dir(at.join("to")).unwrap();
            prepare(&at, old, "from/old");
            prepare(&at, new, "to/new");
            let result = renameat_with(CWD, at.join("from/old"), CWD, at.join("to/new"), flags);
            let answer = result.err().map_or(0, |error| error.raw_os_error());
            all.push(format!("{old} {new} {flags:?}: {answer} {:?}", tell(&at)));
            let inside = errno(fs::rename(at.join("to"), at.join("to/new/below")));
            all.push(format!("into itself, {old} {new}: {inside}"));
            fs::remove_dir_all(&at).unwrap();
        }
    }
    all
}

#[test]
fn renames_do_what_they_do_elsewhere() {
    let Some(mount) = Mount::new() else { return };
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else {
        println!("skipped: needs /dev/shm");
        return;
    };
    assert_eq!(renames(mount.folder.path()), renames(elsewhere.path()));
}

#[test]
fn ten_thousand_files_in_a_folder() {
    let Some(mount) = Mount::new() else { return };
    let folder = mount.path("folder");
    fs::create_dir(&folder).unwrap();
    for number in 0..10_000 {
        fs::write(folder.join(format!("file-{number:05}")), []).unwrap();
    }
    let mut names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names.len(), 10_000);
    assert!(names.iter().enumerate().all(|(number, name)| *name == *format!("file-{number:05}")));
    assert_eq!(mount.inodes(), 10_002);
    fs::remove_dir_all(&folder).unwrap();
    eventually("what the kernel forgot is freed", || mount.inodes() == 1);
}

#[test]
fn extended_attributes_of_any_size() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.path("file");
    fs::write(&path, b"x").unwrap();
    let set = |name: &str, value: &[u8], flags| {
        rustix::fs::setxattr(&path, name, value, flags).err().map_or(0, |error| error.raw_os_error())
    };
    let large = vec![3; 65_536];
    assert_eq!(set("user.large", &large, XattrFlags::empty()), 0);
    assert_eq!(set("user.none", b"", XattrFlags::CREATE), 0);
    assert_eq!(set("user.none", b"", XattrFlags::CREATE), libc::EEXIST);
    assert_eq!(set("user.absent", b"", XattrFlags::REPLACE), libc::ENODATA);
    assert_eq!(set("other.name", b"", XattrFlags::empty()), libc::EOPNOTSUPP);
    let mut value = vec![0; 65_536];
    let mut get = |name: &str, room: usize| {
        rustix::fs::getxattr(&path, name, &mut value[..room]).map_err(|error| error.raw_os_error())
    };
    assert_eq!(get("user.large", 65_536), Ok(65_536));
    assert_eq!(rustix::fs::getxattr_query(&path, "user.large"), Ok(65_536));
    assert_eq!(get("user.large", 100), Err(libc::ERANGE));
    assert_eq!(get("user.none", 100), Ok(0));
    assert_eq!(get("user.absent", 100), Err(libc::ENODATA));
    let mut list = [0_u8; 100];
    let count = rustix::fs::listxattr(&path, &mut list[..]).unwrap();
    let mut names: Vec<_> = list[..count].split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    assert_eq!(names, [&b"user.large"[..], b"user.none"]);
}

#[test]
fn the_time_of_creation_is_told_and_stays() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.path("file");
    fs::write(&path, b"x").unwrap();
    let times = || {
        let found = statx(CWD, &path, rustix::fs::AtFlags::empty(), StatxFlags::ALL).unwrap();
        assert!(found.stx_mask & StatxFlags::BTIME.bits() != 0);
        let ns = |time: rustix::fs::StatxTimestamp| time.tv_sec * 1_000_000_000 + i64::from(time.tv_nsec);
        (ns(found.stx_btime), ns(found.stx_mtime))
    };
    let before = times();
    fs::write(&path, b"changed").unwrap();
    let after = times();
    assert!(after.0 == before.0 && after.1 > before.1, "{before:?} {after:?}");
}
