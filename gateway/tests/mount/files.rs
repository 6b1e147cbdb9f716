//! Contents: appends, unlinked files, space, mappings.

use crate::child::Process;
use crate::{Mount, errno, eventually};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Command;

#[test]
fn two_processes_append_without_losing_a_line() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.path("log");
    fs::write(&path, b"").unwrap();
    let mut processes: Vec<_> = (0..3).map(|_| Process::start("append", &path)).collect();
    processes.iter_mut().for_each(|process| process.said("ready"));
    let ids: Vec<_> = processes.iter().map(Process::id).collect();
    assert!(processes.iter_mut().all(Process::ends));
    let mut next: BTreeMap<u32, u32> = BTreeMap::new();
    for line in fs::read_to_string(&path).unwrap().lines() {
        let (id, number) = line.split_once(' ').unwrap();
        let expected = next.entry(id.parse().unwrap()).or_insert(0);
        assert_eq!(number.parse(), Ok(*expected));
        *expected += 1;
    }
    assert_eq!(ids.iter().map(|id| next[id]).collect::<Vec<_>>(), [500, 500, 500]);
}

#[test]
fn an_unlinked_file_lives_until_it_is_closed() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.path("file");
    let mut file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.write_all(b"first").unwrap();
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"another").unwrap();
    file.write_all(b" and second").unwrap();
    file.rewind().unwrap();
    let mut text = String::new();
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "first and second");
    assert_eq!((file.metadata().unwrap().nlink(), file.metadata().unwrap().size()), (0, 16));
    file.set_len(2).unwrap();
    assert_eq!(mount.inodes(), 3);
    drop(file);
    eventually("the inode is freed", || mount.inodes() == 2);
    assert_eq!(fs::read(&path).unwrap(), b"another");
}

#[test]
fn large_writes_and_reads_are_whole() {
    let Some(mount) = Mount::new() else { return };
    let bytes: Vec<u8> = (0..5_000_011_u32).map(|n| (n ^ (n >> 9)) as u8).collect();
    fs::write(mount.path("file"), &bytes).unwrap();
    assert!(fs::read(mount.path("file")).unwrap() == bytes);
    let file = File::open(mount.path("file")).unwrap();
    let mut part = vec![0; 3_000_000];
    file.read_exact_at(&mut part, 1_234_567).unwrap();
    assert!(part[..] == bytes[1_234_567..4_234_567]);
    assert_eq!(file.read_at(&mut part, 5_000_000).unwrap(), 11);
    assert_eq!(file.read_at(&mut part, 5_000_011).unwrap(), 0);
    fs::copy(mount.path("file"), mount.path("copy")).unwrap();
    assert!(fs::read(mount.path("copy")).unwrap() == bytes);
}

#[test]
fn space_is_reserved_freed_and_found() {
    let Some(mount) = Mount::new() else { return };
    let file = File::options().create_new(true).read(true).write(true).open(mount.path("file")).unwrap();
    let size = || file.metadata().unwrap().size();
    let reserve =
        |flags, offset, bytes| fallocate(&file, flags, offset, bytes).err().map_or(0, |e| e.raw_os_error());
    assert_eq!(reserve(FallocateFlags::KEEP_SIZE, 0, 8192), 0);
    assert_eq!((size(), file.metadata().unwrap().blocks()), (0, 16));
    assert_eq!(reserve(FallocateFlags::empty(), 0, 12_288), 0);
    assert_eq!(size(), 12_288);
    file.write_all_at(&[7; 12_288], 0).unwrap();
    assert_eq!(reserve(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096, 4096), 0);
    let mut bytes = [1; 12_288];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[4096..8192].iter().all(|byte| *byte == 0) && bytes[8192..].iter().all(|byte| *byte == 7));
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(4096));
    assert_eq!(seek(&file, SeekFrom::Data(4096)), Ok(8192));
    assert_eq!(seek(&file, SeekFrom::Data(12_288)).err().map(|e| e.raw_os_error()), Some(libc::ENXIO));
    assert_eq!(reserve(FallocateFlags::ZERO_RANGE, 8192, 4096), 0);
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    assert_eq!(reserve(FallocateFlags::COLLAPSE_RANGE, 0, 4096), libc::EOPNOTSUPP);
    assert_eq!(reserve(FallocateFlags::empty(), 0, 0), libc::EINVAL);
    let read_only = File::open(mount.path("file")).unwrap();
    assert_eq!(errno(read_only.set_len(1)), libc::EINVAL);
}

#[test]
fn a_full_tree_says_so_and_goes_on() {
    let Some(mount) = Mount::new() else { return };
    let room = rustix::fs::statvfs(mount.folder.path()).unwrap();
    let file = File::create(mount.path("file")).unwrap();
    let all = room.f_bfree * room.f_frsize;
    let too_much = fallocate(&file, FallocateFlags::empty(), 0, all + 1);
    assert_eq!(too_much.err().map(|error| error.raw_os_error()), Some(libc::ENOSPC));
    fallocate(&file, FallocateFlags::empty(), 0, all).unwrap();
    assert_eq!(errno(fs::write(mount.path("other"), b"x")), libc::ENOSPC);
    file.set_len(0).unwrap();
    fs::write(mount.path("other"), b"x").unwrap();
}

/// The mappings are made by a few lines of Python, because tests contain no unsafe code.
#[test]
fn mappings_agree_with_reads_and_writes() {
    let Some(mount) = Mount::new() else { return };
    assert!(mount.mounted.maps_shared(), "the kernel is older than 6.6");
    fs::write(mount.path("file"), vec![b'a'; 20_000]).unwrap();
    let script = "
import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDWR)
shared = mmap.mmap(f, 0)
private = mmap.mmap(f, 0, flags=mmap.MAP_PRIVATE)
assert shared[:3] == b'aaa' and private[19999:] == b'a'
private[0:1] = b'p'
assert os.pread(f, 1, 0) == b'a'
shared[5000:5003] = b'bbb'
assert os.pread(f, 5, 4999) == b'abbba', os.pread(f, 5, 4999)
os.pwrite(f, b'ccc', 9000)
assert shared[8999:9004] == b'accca', shared[8999:9004]
shared[19999:20000] = b'z'
shared.flush()
shared[12000:12001] = b'd'
";
    match Command::new("python3").arg("-c").arg(script).arg(mount.path("file")).status() {
        Ok(status) => assert!(status.success()),
        Err(_) => return println!("skipped: needs python3"),
    }
    let bytes = fs::read(mount.path("file")).unwrap();
    assert_eq!(bytes.len(), 20_000);
    assert_eq!((&bytes[4999..5004], &bytes[9000..9003]), (&b"abbba"[..], &b"ccc"[..]));
    assert_eq!((bytes[0], bytes[12_000], bytes[19_999]), (b'a', b'd', b'z'));
}
