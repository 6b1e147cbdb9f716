//! Files that are removed although the mount's kernel knows them: they keep neither inodes nor space. The kernel keeps an
//! inode that no program uses as long as it has memory, and the gateway refers to it meanwhile; so the gateway asks the
//! kernel to forget it.

use crate::MountAndLibrary;
use crate::harness;

/// Files of each case, and bytes of each.
const FILES: usize = 6;
const BYTES: usize = 512 << 10;
/// Blocks that sessions may have reserved: less than those of one case.
const BLOCKS_SPARE: u64 = (FILES * BYTES / 4096) as u64 * 3 / 4;

/// Inodes and references of the node.
type Counts = [u64; 2];

impl MountAndLibrary {
    fn counts(&self) -> Counts {
        let status = self.node.status();
        ["inodes", "references"].map(|field| status[field].as_u64().unwrap())
    }

    fn blocks_free(&self) -> u64 {
        self.node.status()["blocks_free"].as_u64().unwrap()
    }

    /// The tree is empty for both, and the node keeps nothing that it did not keep before.
    fn all_are_gone(&mut self, case: &str, before: Counts) {
        let root = self.path("");
        self.mount.says(&format!("list {root}"), "");
        self.library.says(&format!("list {root}"), "");
        let mut now = self.counts();
        harness::until(&format!("{case}: all are gone, as {before:?}"), || {
            let other = self.counts();
            if other != now {
                println!("{case}: {other:?}");
            }
            now = other;
            now == before
        });
    }

    /// A program of the library makes a file.
    fn made(&mut self, name: &str) -> String {
        let file = self.path(name);
        self.library.does(&format!("open {file} O_RDWR|O_CREAT"));
        self.library.does(&format!("fill {file} x {BYTES}"));
        self.library.does(&format!("close {file}"));
        file
    }

    /// The same; then a program of the library maps it for a while, for which it opens it at the mount.
    fn mapped_by_the_library(&mut self, name: &str) -> String {
        let file = self.made(name);
        self.library.does(&format!("open {file} O_RDWR"));
        self.library.does(&format!("map {file} {BYTES}"));
        self.library.does(&format!("close {file}"));
        self.library.says(&format!("load {file} 0 1"), "x");
        self.library.does(&format!("unmap {file}"));
        file
    }

    fn read_at_the_mount(&mut self, file: &str) {
        self.mount.says(&format!("size {file}"), &BYTES.to_string());
        assert_eq!(self.mount.does(&format!("whole {file}")).len(), BYTES);
    }
}

/// Each creates a file of this name, and removes it.
type Case = fn(&mut MountAndLibrary, &str);

fn mapped(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.mapped_by_the_library(name);
    doors.library.does(&format!("remove {file}"));
}

fn looked_at(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    doors.mount.says(&format!("size {file}"), &BYTES.to_string());
    doors.library.does(&format!("remove {file}"));
}

fn read(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    doors.read_at_the_mount(&file);
    doors.library.does(&format!("remove {file}"));
}

fn open_and_read_later(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    doors.mount.does(&format!("open {file} O_RDWR"));
    doors.library.does(&format!("remove {file}"));
    doors.mount.says(&format!("there {file}"), "False");
    doors.mount.says(&format!("read {file} 5 2"), "xx");
    doors.mount.does(&format!("close {file}"));
}

fn mapped_at_the_mount_and_read_later(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    doors.mount.does(&format!("open {file} O_RDWR"));
    doors.mount.does(&format!("map {file} {BYTES}"));
    doors.mount.does(&format!("close {file}"));
    doors.mount.does(&format!("store {file} 1 STORED"));
    doors.library.does(&format!("remove {file}"));
    doors.mount.says(&format!("there {file}"), "False");
    doors.mount.says(&format!("load {file} 0 8"), "xSTOREDx");
    doors.mount.does(&format!("store {file} 8192 LATER"));
    doors.mount.does(&format!("flush {file}"));
    doors.mount.says(&format!("load {file} 8192 6"), "LATERx");
    doors.mount.does(&format!("unmap {file}"));
}

/// The program has a descriptor that opens nothing. The kernel does not report when it closes it.
fn held_by_its_path(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    doors.read_at_the_mount(&file);
    doors.mount.does(&format!("open {file} O_PATH"));
    doors.library.does(&format!("remove {file}"));
    doors.mount.says(&format!("there {file}"), "False");
    doors.mount.does(&format!("close {file}"));
}

fn renamed_over(doors: &mut MountAndLibrary, name: &str) {
    let [file, other] = [doors.made(name), doors.made(&format!("{name}-other"))];
    doors.read_at_the_mount(&file);
    doors.read_at_the_mount(&other);
    doors.library.does(&format!("rename {other} {file}"));
    doors.read_at_the_mount(&file);
    doors.library.does(&format!("remove {file}"));
}

fn linked(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    let other = format!("{file}-other");
    doors.library.does(&format!("link {file} {other}"));
    doors.read_at_the_mount(&file);
    doors.read_at_the_mount(&other);
    doors.library.does(&format!("remove {file}"));
    doors.mount.says(&format!("there {file}"), "False");
    doors.read_at_the_mount(&other);
    doors.library.does(&format!("remove {other}"));
}

fn folder(doors: &mut MountAndLibrary, name: &str) {
    let folder = doors.path(name);
    doors.library.does(&format!("mkdir {folder}"));
    let file = doors.made(&format!("{name}/file"));
    doors.mount.does(&format!("open {folder} O_RDONLY"));
    doors.mount.says(&format!("list {folder}"), "file");
    doors.read_at_the_mount(&file);
    doors.library.does(&format!("remove {file}"));
    doors.library.does(&format!("rmdir {folder}"));
    doors.mount.says(&format!("there {folder}"), "False");
    doors.mount.does(&format!("close {folder}"));
}

/// The kernel has another name of the file: the one by which the library opened it.
fn mapped_and_removed_at_the_mount(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.mapped_by_the_library(name);
    doors.mount.does(&format!("remove {file}"));
}

fn renamed_over_at_the_mount(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.mapped_by_the_library(name);
    let other = doors.mapped_by_the_library(&format!("{name}-other"));
    doors.mount.does(&format!("rename {other} {file}"));
    doors.read_at_the_mount(&file);
    doors.mount.does(&format!("remove {file}"));
}

/// The kernel keeps the former name until it is looked up again.
fn renamed_and_removed_at_the_mount(doors: &mut MountAndLibrary, name: &str) {
    let file = doors.made(name);
    let other = format!("{file}-other");
    doors.read_at_the_mount(&file);
    doors.library.does(&format!("rename {file} {other}"));
    doors.read_at_the_mount(&other);
    doors.mount.does(&format!("remove {other}"));
}

const CASES: [(&str, Case); 12] = [
    ("mapped", mapped),
    ("looked at", looked_at),
    ("read", read),
    ("open, and read later", open_and_read_later),
    ("mapped at the mount, and read later", mapped_at_the_mount_and_read_later),
    ("held by its path", held_by_its_path),
    ("renamed over", renamed_over),
    ("linked", linked),
    ("folder", folder),
    ("mapped, removed at the mount", mapped_and_removed_at_the_mount),
    ("renamed over at the mount", renamed_over_at_the_mount),
    ("renamed, removed at the mount", renamed_and_removed_at_the_mount),
];

#[test]
fn what_the_library_removes_is_gone_though_the_kernel_knew_it() {
    let Some(mut doors) = MountAndLibrary::new() else { return };
    if !kernel_can_be_asked() {
        println!("skipped: needs a kernel that can be asked to forget inodes (Linux 6.18)");
        return;
    }
    let (before, free) = (doors.counts(), doors.blocks_free());
    for (case, run) in CASES {
        for number in 0..FILES {
            run(&mut doors, &format!("file-{number}"));
        }
        doors.all_are_gone(case, before);
    }
    let now = doors.blocks_free();
    assert!(now + BLOCKS_SPARE >= free, "{now} blocks are free, {free} were");
    doors.end();
}

fn kernel_can_be_asked() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut parts = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (parts.next(), parts.next()) >= (Some(6), Some(18))
}
