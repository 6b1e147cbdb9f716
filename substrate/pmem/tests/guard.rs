//! Files that are truncated while they are mapped. On a guarded medium only accesses to that file return an error; every
//! other SIGBUS acts as without the guard. A case that ends a process runs in a child process: this test program again,
//! with the name of the case.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
#![cfg(target_os = "linux")]

use pmem::read_mapping::CopyError;
use pmem::{MediaError, Medium, Region, Sink};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::sync::atomic::{AtomicI32, Ordering};

const PAGE: u64 = 4096;

fn cut(folder: &Path, name: &str, bytes: u64) {
    File::options().write(true).open(folder.join(name)).unwrap().set_len(bytes).unwrap();
}

fn on_each(test: impl Fn(&Path, &Medium)) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    test(folder.path(), &Medium::memory(folder.path()).unwrap().guarded().unwrap());
    let folder = tempfile::tempdir().unwrap();
    test(folder.path(), &Medium::file(folder.path()).unwrap().guarded().unwrap());
}

fn read(region: &Region, offset: u64) -> Result<u8, MediaError> {
    let mut byte = [9];
    region.read(offset, &mut byte).map(|()| byte[0])
}

/// All operations that access a page which no longer exists.
const TOUCHES: [fn(&Region, u64); 4] = [
    |region, at| assert_eq!(read(region, at), Err(MediaError::Lost)),
    |region, at| region.write(at, &[1; 300]),
    |region, at| region.store(at, &[1; 3]),
    |region, at| region.persist(at..at + 64),
];

/// The region of a file that is read through a second mapping stays what it is.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_copy_from_a_mapping_for_reading_ends_where_the_file_is_gone() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap().guarded().unwrap();
    let log = medium.create("log", 4 * PAGE).unwrap();
    log.write(0, &[7; 4 * PAGE as usize]);
    let mapping = log.map_for_reading().unwrap();
    let copy = |offset, bytes: usize| {
        let mut target = vec![0; bytes];
        mapping.copy_to(offset, &mut Sink::from(&mut target[..]), bytes).map(|()| target)
    };
    assert_eq!(copy(10, 9000), Ok(vec![7; 9000]));
    cut(folder.path(), "log", 2 * PAGE);
    for (offset, bytes) in [(0, 9000), (2 * PAGE, 1), (4 * PAGE - 64, 64)] {
        assert_eq!(copy(offset, bytes), Err(CopyError::Media(MediaError::Unreadable)), "{offset}");
    }
    assert_eq!(copy(0, 8192), Ok(vec![7; 8192]));
    assert_eq!((log.check(), medium.lost(|_| true)), (Ok(()), None));
    let plain = Medium::memory(folder.path()).unwrap().create("plain", PAGE).unwrap();
    assert!(plain.map_for_reading().is_none(), "its faults would end the process");
}

#[test]
fn a_file_that_is_cut_is_lost_where_it_is_touched_and_no_other_is() {
    for touch in TOUCHES {
        on_each(|folder, medium| {
            let (tree, other) =
                (medium.create("tree", 3 * PAGE + 400).unwrap(), medium.create("other", 2 * PAGE).unwrap());
            for region in [&tree, &other] {
                region.write(0, &[7; 5000]);
                region.sync().unwrap();
            }
            cut(folder, "tree", PAGE);
            // No access has met the truncated part yet.
            assert_eq!((tree.check(), read(&tree, 0)), (Ok(()), Ok(7)));
            assert_eq!(medium.lost(|_| true), None);
            touch(&tree, 3 * PAGE);
            assert_eq!(tree.check(), Err(MediaError::Lost));
            assert_eq!(medium.lost(|_| true), Some("tree".to_owned()));
            assert_eq!(medium.lost(|name| name != "tree"), None);
            // The whole region is lost, also for its other clones.
            assert_eq!(read(&tree.clone(), 0), Err(MediaError::Lost));
            tree.write(PAGE, &[1; 5000]);
            assert_eq!(tree.sync(), Err(MediaError::Lost));
            assert_eq!(tree.sync(), Err(MediaError::Poisoned));
            assert_eq!((other.check(), read(&other, 4999), other.sync()), (Ok(()), Ok(7), Ok(())));
            // The medium remembers the loss after the region is closed; a new region maps the rest of the file.
            drop(tree);
            assert_eq!(medium.lost(|_| true), Some("tree".to_owned()));
            assert_eq!(
                (medium.open("tree").unwrap().bytes(), read(&medium.open("tree").unwrap(), 0)),
                (PAGE, Ok(7))
            );
        });
    }
}

#[test]
fn a_file_that_is_cut_does_not_grow_by_a_fill() {
    on_each(|folder, medium| {
        let tree = medium.create("tree", 8 * PAGE).unwrap();
        cut(folder, "tree", 2 * PAGE);
        tree.fill(6 * PAGE, &[7; 2 * PAGE as usize]);
        assert_eq!((tree.check(), read(&tree, 3 * PAGE)), (Err(MediaError::Lost), Err(MediaError::Lost)));
        assert_eq!(std::fs::metadata(folder.join("tree")).unwrap().len(), 2 * PAGE);
    });
}

/// As if it was cut while the kernel copied. A file on a disk gets its missing pages again by a store.
#[test]
fn a_file_that_is_cut_and_filled_again_is_lost_at_the_next_sync() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap().guarded().unwrap();
    let tree = medium.create("tree", 8 * PAGE).unwrap();
    tree.fill(PAGE, &[7; PAGE as usize]);
    assert_eq!((tree.sync(), read(&tree, PAGE)), (Ok(()), Ok(7)));
    cut(folder.path(), "tree", 2 * PAGE);
    cut(folder.path(), "tree", 8 * PAGE);
    tree.fill(6 * PAGE, &[7; 2 * PAGE as usize]);
    assert_eq!((tree.check(), tree.sync()), (Ok(()), Err(MediaError::Lost)));
    assert_eq!(medium.lost(|_| true), Some("tree".to_owned()));
}

#[test]
fn many_touch_what_is_cut_while_others_come_and_go() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = Medium::memory(folder.path()).unwrap().guarded().unwrap();
    medium.create("other", PAGE).unwrap();
    for round in 0..50 {
        let name = format!("file-{round}");
        let region = medium.create(&name, 64 * PAGE).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let region = &region;
                scope.spawn(move || {
                    let mut page = thread;
                    while region.check().is_ok() {
                        region.write(page % 64 * PAGE, &[1; PAGE as usize]);
                        page += 1;
                    }
                    assert!(region.sync().is_err());
                });
            }
            scope.spawn(|| {
                while region.check().is_ok() {
                    assert_eq!(read(&medium.open("other").unwrap(), 0), Ok(0));
                }
            });
            cut(folder.path(), &name, round % 7 * PAGE);
        });
        assert_eq!(medium.lost(|other| other == name), Some(name.clone()));
    }
    assert_eq!(medium.lost(|name| name == "other"), None);
}

/// Runs the case in a process of its own.
fn ends(case: &str) -> ExitStatus {
    let program = std::env::current_exe().unwrap();
    // Its end is not one that would remove a folder.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut command = Command::new(program);
    command.args(["--exact", "a_case_of_its_own", "--nocapture"]).env("HEARTH_GUARD_CASE", case);
    command.env("HEARTH_GUARD_FOLDER", folder.path());
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null()).status().unwrap()
}

static SEEN: AtomicI32 = AtomicI32::new(0);

extern "C" fn with_info(signal: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel's structure.
    let code = unsafe { (*info).si_code };
    SEEN.store(signal * 100 + i32::from(code > 0), Ordering::SeqCst);
    if code > 0 {
        // SAFETY: ends the process; the access would be made again for ever.
        unsafe { libc::_exit(42) };
    }
}

extern "C" fn plain(signal: i32) {
    SEEN.store(signal, Ordering::SeqCst);
}

fn handle(handler: usize, flags: i32) {
    // SAFETY: the structure is plain old data, and the handlers are those above or the kernel's own.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()), 0);
    }
}

fn send() {
    // SAFETY: a signal for this thread.
    unsafe { libc::raise(libc::SIGBUS) };
}

/// Accesses a truncated file on a medium without a guard.
fn touch_unguarded(folder: &Path) {
    let region = Medium::memory(folder).unwrap().create("log", 2 * PAGE).unwrap();
    cut(folder, "log", 0);
    let _ = read(&region, 0);
}

#[test]
fn a_case_of_its_own() {
    let Ok(case) = std::env::var("HEARTH_GUARD_CASE") else { return };
    let (what, before) = case.split_once(' ').unwrap();
    match before {
        "default" => handle(libc::SIG_DFL, 0),
        "ignored" => handle(libc::SIG_IGN, 0),
        "info" => handle(with_info as *const () as usize, libc::SA_SIGINFO),
        "plain" => handle(plain as *const () as usize, 0),
        _ => {}
    }
    let folder = std::path::PathBuf::from(std::env::var_os("HEARTH_GUARD_FOLDER").unwrap());
    let medium = Medium::memory(&folder).unwrap().guarded().unwrap();
    let region = medium.create("tree", PAGE).unwrap();
    match what {
        "foreign" => touch_unguarded(&folder),
        "sent" => send(),
        "ours" => {
            cut(&folder, "tree", 0);
            assert_eq!(read(&region, 0), Err(MediaError::Lost));
        }
        _ => {}
    }
    // SAFETY: ends the process, with what the handler saw.
    unsafe { libc::_exit(SEEN.load(Ordering::SeqCst) & 0xff) };
}

#[test]
fn what_is_not_ours_goes_to_who_had_it_before() {
    let killed = Some(libc::SIGBUS);
    for before in ["default", "ignored", "rust"] {
        assert_eq!(ends(&format!("foreign {before}")).signal(), killed, "{before}");
    }
    assert_eq!(ends("sent default").signal(), killed);
    assert_eq!(ends("sent ignored").code(), Some(0));
    assert_eq!(ends("foreign info").code(), Some(42));
    assert_eq!(ends("sent info").code(), Some((libc::SIGBUS * 100) & 0xff));
    assert_eq!(ends("sent plain").code(), Some(libc::SIGBUS));
    for before in ["default", "ignored", "rust", "info", "plain"] {
        assert_eq!(ends(&format!("ours {before}")).code(), Some(0), "{before}");
    }
}
