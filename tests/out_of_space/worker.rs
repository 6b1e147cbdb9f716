//! A program of a user that makes random calls in a folder of its own, and what it has to find there.

use crate::model::{Allocation, BLOCK, Call, File, Folder, runs};
use crate::processes::Job;
use crate::random::Random;
use std::collections::BTreeMap;
use std::sync::Mutex;

/// Names of small files. The last one is that of a large file.
const NAMES: [&str; 7] = ["a", "b", "c", "d", "e", "f", "filler"];
const LARGE: &str = NAMES[NAMES.len() - 1];
/// Bytes of the writes that fill the pool.
const FILL_BYTES: u64 = 64 << 10;
/// One call in so many is the first of those that fill the pool again.
const FILLS: u64 = 16;
/// Descriptors that a program has open at most.
const OPEN_MAX: usize = 6;
/// Sizes up to which calls extend a small file.
const SMALL_BYTES_MAX: u64 = 512 << 10;
/// No file needs more, because the pool has less.
const LARGE_BYTES_MAX: u64 = 1 << 30;
/// Bytes of a read of a whole file; the answer has more.
const READ_BYTES: u64 = 1 << 20;

/// Starts the program of a worker.
pub type StartProgram = Box<dyn Fn() -> Job + Send>;

pub struct Worker {
    pub name: String,
    start: StartProgram,
    by_library: bool,
    /// The commands by which the program becomes that of its user.
    user: Option<String>,
    job: Job,
    random: Random,
    folder: Folder,
    /// The last calls with their answers, for a message.
    history: Vec<String>,
    /// Answers of ENOSPC, and writes that were short.
    pub refused: u64,
}

impl Worker {
    /// A worker whose program does not run with the rights of `root` if a user is given.
    pub fn new(
        name: String,
        (user, by_library): (Option<u32>, bool),
        seed: u64,
        start: StartProgram,
    ) -> Self {
        let job = start();
        let user = user.map(|user| format!("user {user} {user} - good"));
        let mut worker = Self {
            name,
            start,
            by_library,
            user,
            job,
            random: Random::new(seed),
            folder: Folder::default(),
            history: Vec::new(),
            refused: 0,
        };
        worker.begins();
        worker
    }

    fn begins(&mut self) {
        assert_eq!(self.job.line().as_deref(), Some("0"), "{}: its program begins", self.name);
        if let Some(user) = self.user.clone() {
            assert_eq!(self.tell(&user), "0", "{}: {user}", self.name);
        }
    }

    fn tell(&mut self, call: &str) -> String {
        self.job.tell(call);
        self.job.line().unwrap_or_else(|| "no answer".to_owned())
    }

    /// Makes a call, and compares its answer.
    fn call(&mut self, call: &Call) {
        let answer = self.tell(&call.to_string());
        self.took(call, &answer);
    }

    fn took(&mut self, call: &Call, answer: &str) {
        let shown: String = answer.chars().take(200).collect();
        self.history.push(format!("{call} -> {shown}"));
        if let Err(expected) = self.folder.apply(call, answer) {
            let expected: String = expected.chars().take(200).collect();
            panic!("{}: expected {expected} of the last of these calls:\n{}", self.name, self.last_calls());
        }
        let is_short = matches!(call, Call::Write { bytes, .. } if answer != bytes.to_string());
        self.refused += u64::from(answer == "ENOSPC" || is_short);
    }

    fn last_calls(&self) -> String {
        let from = self.history.len().saturating_sub(400);
        self.history[from..].join("\n")
    }

    /// Appends to the large file until there is no space: at first in large pieces, at last one block.
    pub fn fill(&mut self) {
        if self.folder.open().len() == OPEN_MAX {
            self.call(&Call::Close(self.folder.open()[0]));
        }
        let open = Call::Open { name: LARGE, truncates: false };
        let before = self.folder.open();
        self.call(&open);
        let fd = self.folder.open().into_iter().find(|fd| !before.contains(fd)).expect("it was opened");
        for bytes in [FILL_BYTES, BLOCK] {
            let refused = self.refused;
            while self.refused == refused && self.folder.behind(fd).size() < LARGE_BYTES_MAX {
                let (offset, letter) = (self.folder.behind(fd).size(), self.letter());
                self.call(&Call::Write { fd, offset, bytes, letter });
            }
        }
        self.call(&Call::Close(fd));
    }

    /// Makes random calls, and counts them. With a lock for the start of a program, the program is
    /// killed at times, also in the middle of a call.
    pub fn go_on(&mut self, calls: u64, starts: Option<&Mutex<()>>, counted: impl Fn()) {
        for _ in 0..calls {
            if self.random.one_in(FILLS) {
                self.fill();
            }
            let call = self.next_call();
            match starts {
                Some(starts) if self.random.one_in(60) => self.kill_in(&call, starts),
                _ => self.call(&call),
            }
            counted();
        }
    }

    fn letter(&mut self) -> char {
        char::from(b'A' + self.random.below(26) as u8)
    }

    fn name(&mut self) -> &'static str {
        self.random.of(&NAMES)
    }

    /// An offset in a file or near its end.
    fn offset(&mut self, fd: u64) -> u64 {
        let size = self.folder.behind(fd).size();
        match self.random.below(6) {
            0 => size,
            1 => size.min(SMALL_BYTES_MAX) + self.random.of(&[1, 4096, 5000, 40_960]),
            2 => self.random.below(size + 1) / BLOCK * BLOCK,
            _ => self.random.below(size + 1),
        }
    }

    fn next_call(&mut self) -> Call {
        let open = self.folder.open();
        let (name, other) = (self.name(), self.name());
        let by_name = open.is_empty() || self.random.one_in(4);
        if by_name {
            // The pool stays nearly full.
            let small = NAMES[self.random.below(NAMES.len() as u64 - 1) as usize];
            let name = if self.random.one_in(40) { name } else { small };
            return match self.random.below(12) {
                0 => Call::Unlink(name),
                1 => Call::Rename(other, name),
                2 => Call::Link(other, name),
                3 => Call::Mode(other, self.random.of(&["0644", "0600"])),
                4 => Call::ResizeByName { name, size: self.random.below(SMALL_BYTES_MAX) },
                5 => Call::ResizeByName { name, size: self.random.below(100) * BLOCK },
                _ if open.len() < OPEN_MAX => {
                    Call::Open { name: other, truncates: other != LARGE && self.random.one_in(8) }
                }
                _ => Call::Close(self.random.of(&open)),
            };
        }
        let fd = self.random.of(&open);
        let (offset, size) = (self.offset(fd), self.folder.behind(fd).size());
        let bytes = self.random.of(&[1, 100, 4096, 5000, 9000, 16_384, 20_000, 65_536, 65_536, 200_000]);
        match self.random.below(20) {
            0..=9 => Call::Write { fd, offset, bytes, letter: self.letter() },
            10 | 11 => Call::Read { fd, offset, bytes },
            12 if size < SMALL_BYTES_MAX => Call::Resize { fd, size: offset },
            12 => Call::Resize { fd, size: size - self.random.below(100_000) },
            13 => {
                Call::Resize { fd, size: size.saturating_sub(self.random.below(40) * BLOCK) / BLOCK * BLOCK }
            }
            14 | 15 => {
                let how = [Allocation::Extend, Allocation::KeepSize];
                Call::Allocate { fd, how: self.random.of(&how), offset, bytes }
            }
            16 | 17 => Call::Allocate { fd, how: Allocation::PunchHole, offset, bytes },
            18 => Call::Sync(fd),
            _ => Call::Close(fd),
        }
    }

    /// Kills the program in the middle of a call, and looks which part of the call was executed.
    fn kill_in(&mut self, call: &Call, starts: &Mutex<()>) {
        // A call of a program at the mount may go on after its end.
        let between = !self.by_library || self.random.one_in(2);
        if between {
            self.call(call);
        } else {
            self.job.tell(&call.to_string());
            crate::processes::spin(self.random.below(200_000));
        }
        self.job.kill();
        self.job.wait();
        let answer = self.job.line();
        let interrupted = match (between, answer) {
            (true, _) => None,
            (false, Some(answer)) => {
                self.took(call, &answer);
                None
            }
            (false, None) => Some(call),
        };
        let folders = match interrupted {
            None => {
                self.folder.close_all();
                vec![self.folder.clone()]
            }
            Some(call) => {
                self.history.push(format!("{call} -> killed"));
                self.folder.after_an_interrupted(call)
            }
        };
        // docs/semantics.md, "The daemon dies": a program that starts then may get EIO.
        let _daemon_lives = starts.lock().unwrap();
        self.restart();
        // The records of a program at the mount are applied later, and no one knows the number of blocks before.
        self.folder = self.find_in(folders, self.by_library);
    }

    fn restart(&mut self) {
        self.job = (self.start)();
        self.begins();
    }

    /// Ends the program, by force or because it gets no further call.
    pub fn end(&mut self, by_force: bool) {
        if by_force {
            self.job.kill();
        } else {
            self.job.end_input();
        }
        self.job.wait();
        self.folder.close_all();
    }

    /// Starts the program again, and compares all of its folder, after all calls are applied.
    pub fn compare(&mut self) {
        self.restart();
        self.folder = self.find_in(vec![self.folder.clone()], true);
    }

    /// The one of several folders that is there.
    fn find_in(&mut self, folders: Vec<Folder>, with_blocks: bool) -> Folder {
        let found = self.found();
        let mut why = String::new();
        for folder in folders {
            let expected: BTreeMap<&str, &File> = folder.named().collect();
            match difference(&found, &expected, with_blocks) {
                None => return folder,
                Some(difference) => why += &format!("{difference}\n"),
            }
        }
        panic!("{}: {why}after these calls:\n{}", self.name, self.last_calls());
    }

    /// The names of the folder; of each file its bytes and the number of its blocks.
    fn found(&mut self) -> BTreeMap<String, (String, u64)> {
        let list = self.tell("list . .");
        assert!(list.starts_with("0 "), "{}: the list of its folder: {list}", self.name);
        let names: Vec<String> = list
            .split(' ')
            .filter_map(|entry| entry.split_once(":f,"))
            .map(|(name, _)| name.to_owned())
            .collect();
        names.into_iter().map(|name| (name.clone(), self.found_file(&name))).collect()
    }

    fn found_file(&mut self, name: &str) -> (String, u64) {
        let fd = self.tell(&format!("open . {name} O_RDONLY 0"));
        let blocks = self.tell(&format!("blocks {fd}"));
        let numbers: Vec<u64> = blocks.split(' ').map(|word| word.parse().expect("numbers")).collect();
        let [_, size, sectors] = numbers[..] else { panic!("{}: {name}: {blocks}", self.name) };
        let mut text = size.to_string();
        for offset in (0..size).step_by(READ_BYTES as usize) {
            let read = self.tell(&format!("pread {fd} {READ_BYTES} {offset}"));
            text += &format!("\n{read}");
        }
        assert_eq!(self.tell(&format!("close {fd}")), "0");
        (text, sectors * 512 / BLOCK)
    }

    /// Removes all files.
    pub fn remove_all(&mut self) {
        self.open_names().into_iter().for_each(|name| self.call(&Call::Unlink(name)));
        self.folder.open().into_iter().for_each(|fd| self.call(&Call::Close(fd)));
    }

    fn open_names(&self) -> Vec<&'static str> {
        self.folder.named().map(|(name, _)| name).collect()
    }
}

/// The first difference between what is there and what should be.
fn difference(
    found: &BTreeMap<String, (String, u64)>,
    expected: &BTreeMap<&str, &File>,
    with_blocks: bool,
) -> Option<String> {
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    if !names.iter().eq(expected.keys()) {
        return Some(format!("there are {names:?}, and not {:?}", expected.keys()));
    }
    for (name, file) in expected {
        let (text, blocks) = &found[*name];
        if with_blocks && *blocks != file.blocks.len() as u64 {
            return Some(format!("{name} has {blocks} blocks, and not {}", file.blocks.len()));
        }
        let mut wanted = file.size().to_string();
        for part in file.bytes.chunks(READ_BYTES as usize) {
            wanted += &format!("\n{}{}", part.len(), runs(part));
        }
        if *text != wanted {
            let at = text.bytes().zip(wanted.bytes()).take_while(|(one, other)| one == other).count();
            let near = |text: &str| {
                text.get(at.saturating_sub(80)..(at + 80).min(text.len())).unwrap_or_default().to_owned()
            };
            return Some(format!("{name} contains ...{}..., and not ...{}...", near(text), near(&wanted)));
        }
    }
    None
}
