//! The floor of a write and its fsync on two nodes: three processes that store the same bytes and hand them on in the same
//! way, and do nothing else.
//!
//! The program stores the bytes in memory, with a checksum and a fence, and calls the head through shared words. The
//! head reads them and sends them over a connection like that between two daemons. The replica stores and fences them,
//! and answers; the head answers the program. Every process waits as Hearth's threads do: it polls for a bounded time,
//! then sleeps; program and head sleep at once if they have the same processor.

use crate::error::{Error, Result};
use crate::placement::{Placement, hold};
use crate::say;
use format::checksum::{self, Salt};
use format::{Epoch, NodeId};
use ipc::shared::PAGE_BYTES;
use ipc::sync::Ordering;
use ipc::{Access, Descriptor, Host, Mapping, Processors, Side, Spin, SystemHost, Time, Word, Words};
use pmem::{Medium, Region};
use rustix::process::Pid;
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;
use transport::{Connection, Endpoint, Event, Fabric, Secret};

/// Bytes of the memory of one process.
const REGION_BYTES: u64 = 32 << 20;
/// A process that receives nothing for so long ends.
const IDLE: Duration = Duration::from_secs(60);
/// A process polls for at most so long before it sleeps, as a daemon does.
const SPIN_NS: u32 = 100_000;
/// Bytes at the start of a message: how many bytes follow in later messages.
const LEFT_BYTES: usize = size_of::<u32>();

/// Names of the processes' memory, and of the file with the key of the connection.
const PROGRAM: &str = "program";
const REPLICA: &str = "replica";
const KEY: &str = "key";

/// Index of each shared word. The program increments the first one for a request, the head sets the second one to it.
const REQUEST: usize = 0;
const ANSWER: usize = 1;
/// 1 while the head waits asleep for a request, and while the program waits asleep for an answer.
const HEAD_SLEEPS: usize = 2;
const PROGRAM_SLEEPS: usize = 3;
/// Place and length of the bytes in the program's memory.
const OFFSET: usize = 4;
const BYTES: usize = 5;
const WORDS: usize = 6;
/// Place of the words with the processors of both.
const PROCESSORS: usize = 64;

/// The program's side, with the two other processes.
pub struct Floor {
    shared: Shared,
    region: Region,
    offset: u64,
    parties: Vec<Child>,
}

/// The memory that program and head share.
struct Shared {
    words: Words<Word>,
    processors: Processors,
    spin: Spin,
}

impl Shared {
    fn open(memory: &Descriptor) -> Result<Self> {
        let mapping = Mapping::new(memory, PAGE_BYTES, Access::Write).map_err(told)?;
        let processors = mapping.words(PROCESSORS, Processors::WORDS).map_err(told)?;
        Ok(Self {
            words: mapping.words(0, WORDS).map_err(told)?,
            processors: Processors::new(processors),
            spin: Spin::new(SPIN_NS),
        })
    }

    /// The word for which a side waits, and the one that is 1 while it sleeps.
    fn awaited(&self, side: Side) -> (&Word, &Word) {
        match side {
            Side::Client => (&self.words[ANSWER], &self.words[PROGRAM_SLEEPS]),
            Side::Server => (&self.words[REQUEST], &self.words[HEAD_SLEEPS]),
        }
    }

    /// Waits until the word of this side differs from `was`; `None` after [`IDLE`].
    fn wait(&self, side: Side, was: u32) -> Option<u32> {
        let (host, (word, sleeps)) = (SystemHost, self.awaited(side));
        // SeqCst: pairs with the store and the load in `set`.
        let changed = || Some(word.load(Ordering::SeqCst)).filter(|value| *value != was);
        let shares = self.processors.enter(&host, side);
        if !shares && self.spin.poll(&host, || changed().is_some()) {
            return changed();
        }
        let begin = host.now();
        let until = begin.after(IDLE);
        sleeps.store(1, Ordering::SeqCst);
        while changed().is_none() && host.now() < until {
            if side == Side::Server {
                self.processors.forget(side);
            }
            host.wait(word, was, Some(until));
        }
        sleeps.store(0, Ordering::SeqCst);
        self.spin.learn(host.now().since(begin));
        changed()
    }

    /// Sets the word for which a side waits, and wakes it if it sleeps.
    fn set(&self, waiting: Side, value: u32) {
        let (word, sleeps) = self.awaited(waiting);
        word.store(value, Ordering::SeqCst);
        if sleeps.load(Ordering::SeqCst) != 0 {
            SystemHost.wake(word, 1);
        }
    }
}

fn told(why: impl std::fmt::Display) -> Error {
    Error::new(format!("the floor cannot be measured: {why}"))
}

fn memory(folder: &Path, name: &str) -> Result<Region> {
    let medium = Medium::memory(folder).map_err(Error::at("use", folder))?;
    medium.open(name).map_err(Error::at("use", folder))
}

fn endpoint(folder: &Path, node: u32) -> Result<Endpoint> {
    let file = folder.join(KEY);
    let text = std::fs::read_to_string(&file).map_err(Error::at("read", &file))?;
    let secret = Secret::parse(&text).ok_or_else(|| told("no key"))?;
    let fabric = Fabric::tcp("127.0.0.1");
    let host: Arc<dyn Host> = Arc::new(SystemHost);
    fabric.endpoint(host, secret.identity(NodeId::new(node)), Epoch::new(1), mirror::settings()).map_err(told)
}

fn until() -> Option<Time> {
    Some(SystemHost.now().after(IDLE))
}

fn next(connection: &Connection) -> Result<Option<Vec<u8>>> {
    match connection.take(until()).map_err(told)? {
        Event::Message(message) => Ok(Some(message)),
        Event::Immediate(_) | Event::Ended(_) => Ok(None),
    }
}

impl Floor {
    /// Starts the two other processes, which use a folder on a tmpfs.
    ///
    /// # Errors
    /// A process cannot be started, or there is no memory.
    pub fn start(scratch: &Path) -> Result<Self> {
        let folder = scratch.join("floor");
        std::fs::create_dir_all(&folder).map_err(Error::at("make", &folder))?;
        let medium = Medium::memory(&folder).map_err(Error::at("use", &folder))?;
        for name in [PROGRAM, REPLICA] {
            let region = medium.create(name, REGION_BYTES).map_err(Error::at("use", &folder))?;
            // The first touch of a page costs more than any copy.
            let zeros = vec![0u8; 1 << 20];
            (0..REGION_BYTES).step_by(zeros.len()).for_each(|offset| region.write(offset, &zeros));
        }
        let mut key = OpenOptions::new();
        key.write(true).create_new(true).mode(0o600);
        let file = folder.join(KEY);
        let text = Secret::generate(&SystemHost).text();
        let written = key.open(&file).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(Error::at("write", &file))?;
        let shared = ipc::shared::create(c"floor", PAGE_BYTES).map_err(told)?;
        let mut floor = Self {
            shared: Shared::open(&shared)?,
            region: memory(&folder, PROGRAM)?,
            offset: 0,
            parties: Vec::new(),
        };
        let address = floor.party(&folder, "replica", None, Stdio::null())?;
        let given = OwnedFd::from(shared);
        floor.party(&folder, "head", Some(&address), given.into())?;
        Ok(floor)
    }

    /// Starts a process, and returns its message when it is ready.
    fn party(&mut self, folder: &Path, name: &str, peer: Option<&str>, input: Stdio) -> Result<String> {
        let program = std::env::current_exe().map_err(told)?;
        let mut command = Command::new(program);
        // The library would take the calls of the program only, but its start costs time.
        command.env_remove("LD_PRELOAD").arg("floor").arg(name).arg(folder).args(peer);
        let mut child = command.stdin(input).stdout(Stdio::piped()).spawn().map_err(told)?;
        let said = child.stdout.take().map(BufReader::new);
        self.parties.push(child);
        let mut line = String::new();
        said.ok_or_else(|| told("no pipe"))?.read_line(&mut line).map_err(told)?;
        match line.trim() {
            "" => Err(told(format_args!("its {name} did not begin"))),
            said => Ok(said.to_owned()),
        }
    }

    /// Keeps the two other processes on their processors.
    ///
    /// # Errors
    /// A process is gone, or the kernel refuses.
    pub fn hold(&self, placement: &Placement) -> Result<()> {
        // In the order in which they were started.
        for (party, processor) in self.parties.iter().zip([placement.copy, placement.head]) {
            hold(Some(Pid::from_child(party)), processor)?;
        }
        Ok(())
    }

    /// One round: the bytes are stored here and at the replica.
    ///
    /// # Errors
    /// A process is gone.
    pub fn round(&mut self, bytes: &[u8]) -> Result<()> {
        std::hint::black_box(checksum::of(Salt::NONE, bytes));
        let count = bytes.len() as u64;
        let offset = if self.offset + count > REGION_BYTES { 0 } else { self.offset };
        self.offset = offset + count.next_multiple_of(64);
        self.region.write(offset, bytes);
        self.region.fence();
        // Relaxed: the request orders them.
        let words = &self.shared.words;
        words[OFFSET].store(offset as u32, Ordering::Relaxed);
        words[BYTES].store(count as u32, Ordering::Relaxed);
        let before = words[REQUEST].load(Ordering::Relaxed);
        self.shared.set(Side::Server, before.wrapping_add(1));
        let answer = self.shared.wait(Side::Client, before);
        answer.map(drop).ok_or_else(|| told("its head does not answer"))
    }
}

impl Drop for Floor {
    fn drop(&mut self) {
        for party in &mut self.parties {
            let _ = party.kill();
            let _ = party.wait();
        }
    }
}

/// `hearth floor head`: the memory with the shared words is its standard input.
///
/// # Errors
/// The replica is gone.
pub fn head(folder: &Path, replica: &str) -> Result<()> {
    let input = std::io::stdin().as_fd().try_clone_to_owned().map_err(told)?;
    let shared = Shared::open(&Descriptor::from(input))?;
    let region = memory(folder, PROGRAM)?;
    let endpoint = endpoint(folder, 1)?;
    let deadline = SystemHost.now().after(IDLE);
    let connection = endpoint.connect(replica, NodeId::new(2), deadline).map_err(told)?;
    say::line("ready");
    let room = connection.message_bytes_max() - LEFT_BYTES;
    let (mut message, mut served) = (vec![0; LEFT_BYTES + room], 0);
    while let Some(request) = shared.wait(Side::Server, served) {
        let mut offset = u64::from(shared.words[OFFSET].load(Ordering::Relaxed));
        let mut left = shared.words[BYTES].load(Ordering::Relaxed) as usize;
        while left > 0 {
            let count = left.min(room);
            left -= count;
            message[..LEFT_BYTES].copy_from_slice(&(left as u32).to_le_bytes());
            region.read(offset, &mut message[LEFT_BYTES..LEFT_BYTES + count]).map_err(told)?;
            connection.send(&message[..LEFT_BYTES + count], until()).map_err(told)?;
            offset += count as u64;
        }
        if next(&connection)?.is_none() {
            return Err(told("its replica is gone"));
        }
        served = request;
        shared.set(Side::Client, served);
    }
    Ok(())
}

/// `hearth floor replica`: it prints the address to which the head connects.
///
/// # Errors
/// No head connects.
pub fn replica(folder: &Path) -> Result<()> {
    let region = memory(folder, REPLICA)?;
    let endpoint = endpoint(folder, 2)?;
    let listener = endpoint.listen("0").map_err(told)?;
    say::line(listener.address());
    let connection = listener.accept(until()).map_err(told)?;
    let mut offset = 0;
    while let Some(message) = next(&connection)? {
        let Some((left, bytes)) = message.split_first_chunk::<LEFT_BYTES>() else { break };
        if offset + bytes.len() as u64 > REGION_BYTES {
            offset = 0;
        }
        region.write(offset, bytes);
        offset += bytes.len().next_multiple_of(64) as u64;
        if *left == [0; LEFT_BYTES] {
            region.fence();
            connection.send(&[0; 8], until()).map_err(told)?;
        }
    }
    Ok(())
}
