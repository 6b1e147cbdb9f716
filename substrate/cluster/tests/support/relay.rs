//! A relay in front of a socket that can stop to pass bytes in either direction, as a network with a cut does.

use ipc::sync::Ordering;
use ipc::{Host, SystemHost, WAKE_ALL, Word};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// The direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Requests = 1,
    Answers = 2,
}

#[derive(Default)]
struct Shared {
    /// Bits of the directions that are cut.
    cut: Word,
    /// Number of connections that were made.
    made: Word,
    /// The first connections, in this number, pass nothing any more.
    dead: Word,
    stop: Word,
    /// Number of running threads.
    live: Word,
}

/// The relay.
pub struct Relay {
    _folder: tempfile::TempDir,
    socket: PathBuf,
    shared: Arc<Shared>,
}

impl Relay {
    /// Starts a relay in front of the socket at `behind`.
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

    /// Stops to pass bytes in these directions.
    #[allow(dead_code, reason = "not every test asks for it")]
    pub fn cut(&self, directions: &[Direction]) {
        let bits = directions.iter().fold(0, |bits, direction| bits | *direction as u32);
        self.shared.cut.store(bits, Ordering::Release);
    }

    /// Stops to pass bytes on the existing connections, without an error for their ends; new connections work.
    #[allow(dead_code, reason = "not every test asks for it")]
    pub fn lose_connections(&self) {
        self.shared.dead.store(self.shared.made.load(Ordering::Acquire), Ordering::Release);
    }

    /// Ends all its threads.
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

/// Passes bytes from the first end to the second.
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
                // Bytes that were read after the cut are lost, with everything that follows.
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
