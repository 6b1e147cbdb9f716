//! A relay in front of a socket, that can stop passing bytes on in either direction: a network that is cut.

use ipc::sync::Ordering;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Requests = 1,
    Answers = 2,
}

#[derive(Default)]
struct Shared {
    /// Bits of the directions that are cut.
    cut: Word,
    /// Connections that were made.
    made: Word,
    /// The first so many of them pass nothing on any more.
    dead: Word,
    stop: Word,
    /// Threads that run.
    live: Word,
}

/// The relay.
pub struct Relay {
    _folder: tempfile::TempDir,
    socket: PathBuf,
    shared: Arc<Shared>,
}

impl Relay {
    /// In front of the socket at `behind`.
    pub fn start(behind: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("relay");
        let listener = UnixListener::bind(&socket).unwrap();
        let shared = Arc::new(Shared::default());
        let (theirs, behind) = (shared.clone(), behind.to_owned());
        start(&shared, move || {
            while let Ok((near, _)) = listener.accept() {
                if theirs.stop.load(Ordering::Acquire) != 0 {
                    return;
                }
                let Ok(far) = UnixStream::connect(&behind) else { continue };
                let number = theirs.made.fetch_add(1, Ordering::AcqRel);
                let ends = (near.try_clone().unwrap(), far.try_clone().unwrap());
                pump(&theirs, number, Direction::Requests, ends);
                pump(&theirs, number, Direction::Answers, (far, near));
            }
        });
        Self { _folder: folder, socket, shared }
    }

    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// From now on nothing goes these ways.
    #[allow(dead_code, reason = "not every test asks for it")]
    pub fn cut(&self, directions: &[Direction]) {
        let bits = directions.iter().fold(0, |bits, direction| bits | *direction as u32);
        self.shared.cut.store(bits, Ordering::Release);
    }

    /// From now on nothing goes by the connections that there are, and nobody is told; new ones work.
    #[allow(dead_code, reason = "not every test asks for it")]
    pub fn lose_connections(&self) {
        self.shared.dead.store(self.shared.made.load(Ordering::Acquire), Ordering::Release);
    }

    /// Ends every thread of it.
    pub fn stop(self) {
        self.shared.stop.store(1, Ordering::Release);
        let _ = UnixStream::connect(&self.socket);
        loop {
            let live = self.shared.live.load(Ordering::Acquire);
            if live == 0 {
                return;
            }
            let _ = SystemHost.wait(&self.shared.live, live, None);
        }
    }
}

fn start(shared: &Arc<Shared>, body: impl FnOnce() + Send + 'static) {
    let shared = shared.clone();
    shared.live.fetch_add(1, Ordering::AcqRel);
    let run = move || {
        body();
        shared.live.fetch_add(u32::MAX, Ordering::AcqRel);
        SystemHost.wake(&shared.live, WAKE_ALL);
    };
    SystemHost.spawn("relay", Box::new(run)).unwrap();
}

/// Passes bytes on, one way, from the first end to the second.
fn pump(
    shared: &Arc<Shared>,
    number: u32,
    direction: Direction,
    (mut from, mut to): (UnixStream, UnixStream),
) {
    let theirs = shared.clone();
    let passes_nothing = move || {
        let cut = theirs.cut.load(Ordering::Acquire) & direction as u32 != 0;
        cut || number < theirs.dead.load(Ordering::Acquire)
    };
    let theirs = shared.clone();
    start(shared, move || {
        let mut bytes = [0; 4096];
        from.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        while theirs.stop.load(Ordering::Acquire) == 0 {
            match from.read(&mut bytes) {
                Ok(0) => break,
                // What was read after the cut is lost with everything that follows.
                Ok(_) if passes_nothing() => {}
                Ok(count) => {
                    if to.write_all(&bytes[..count]).is_err() {
                        break;
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(_) => break,
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
}
