//! Path resolution: `.`, `..`, trailing slashes, symbolic links, and paths that leave the tree.
//!
//! The engine takes the components in batches ([`Engine::walk`]) and stops at symbolic links, which this module
//! follows, at most 40. A path that leaves the tree, by an absolute link or by `..` above the root, is no error:
//! the caller gets the rest of the path, and the front end continues with it. The order of errors is that of Linux.

use crate::access::{self, Caller};
use crate::engine::{Attributes, Engine, Step, Target};
use crate::error::Error;
use crate::file::File;
use crate::protections::Protections;
use format::record::FileType;
use format::{InodeNumber, Name, NameError};

/// Longest path in bytes, without a terminating zero.
pub const PATH_BYTES_MAX: usize = 4095;

/// Limit of symbolic links followed in one resolution.
pub const LINKS_MAX: u32 = 40;

/// Components passed to the engine at a time.
const BATCH_STEPS: usize = 64;

/// Start of a relative path. A path that begins with `/` starts at the root of the tree.
#[derive(Clone, Copy)]
pub enum Base<'a> {
    /// The working directory.
    Cwd,
    /// The root of the tree.
    Root,
    /// An open file, which should be a directory.
    At(&'a File),
    /// An inode that the caller has pinned.
    Node(InodeNumber),
}

/// A path argument of a system call.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    /// Start of the path.
    pub base: Base<'a>,
    /// Bytes of the path, without a terminating zero.
    pub path: &'a [u8],
}

impl<'a> Place<'a> {
    /// A path relative to the working directory.
    pub fn cwd(path: &'a [u8]) -> Self {
        Self { base: Base::Cwd, path }
    }

    /// A path relative to an open directory.
    pub fn at(file: &'a File, path: &'a [u8]) -> Self {
        Self { base: Base::At(file), path }
    }
}

/// Region of the tree that a resolution may visit, as `openat2` restricts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// No restriction.
    #[default]
    Anywhere,
    /// Only below the start: `..` from there and absolute paths are refused (`RESOLVE_BENEATH`).
    Beneath,
    /// The start counts as the root (`RESOLVE_IN_ROOT`).
    InRoot,
}

/// Restrictions of a resolution by `openat2`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restriction {
    /// Region that it may visit.
    pub scope: Scope,
    /// Symbolic links are refused (`RESOLVE_NO_SYMLINKS`).
    pub no_links: bool,
}

/// Reason why a call on a path was not executed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The call failed.
    Failed(Error),
    /// The path leaves the tree: the front end must repeat the call with the rest of the path.
    Leaves(Leaves),
    /// The call opens a pipe, a socket or a device, which this tree only names: the kernel must open it, through
    /// the mount.
    Special(FileType),
}

/// A path that leaves the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leaves {
    /// Index of the path among the call's arguments: 0 or 1.
    pub argument: usize,
    /// The rest of the path: absolute if it begins with `/`, otherwise relative to the root of the tree and
    /// beginning with `..`.
    pub rest: Vec<u8>,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Stop {
    /// The same reason for the call's second path.
    pub(crate) fn second(self) -> Self {
        match self {
            Self::Leaves(leaves) => Self::Leaves(Leaves { argument: 1, ..leaves }),
            other => other,
        }
    }
}

/// Result of a call on a path.
pub type Outcome<T> = Result<T, Stop>;

/// The last component of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Last {
    /// The path has no last component: it consists of slashes only.
    Root,
    /// `.`
    Dot,
    /// `..`
    DotDot,
    /// A name of any length, and true if slashes follow it.
    Name(Vec<u8>, bool),
}

impl Last {
    /// The name, and true if slashes follow it; `None` if the path does not end in a name.
    ///
    /// # Errors
    /// `NameTooLong`, `Invalid`.
    pub(crate) fn name(&self) -> Result<Option<(Name<'_>, bool)>, Error> {
        match self {
            Self::Name(bytes, slash) => match Name::new(bytes) {
                Ok(name) => Ok(Some((name, *slash))),
                Err(NameError::TooLong) => Err(Error::NameTooLong),
                Err(NameError::Invalid) => Err(Error::Invalid),
            },
            _ => Ok(None),
        }
    }
}

/// One resolution: its current inode, its progress, and the inodes pinned on the way. The creator of a walker must
/// forget the pins.
pub(crate) struct Walker<'e, E: Engine> {
    engine: &'e E,
    caller: &'e Caller,
    protections: fn() -> Protections,
    here: InodeNumber,
    /// Attributes of `here`, if they are known.
    known: Option<Attributes>,
    links: u32,
    restriction: Restriction,
    /// Start of the resolution.
    top: InodeNumber,
    /// Depth of `here` below `top`; counted only in a restricted scope.
    depth: usize,
    /// All inodes that the engine pinned.
    pub(crate) pins: Vec<InodeNumber>,
}

impl<'e, E: Engine> Walker<'e, E> {
    pub(crate) fn new(
        engine: &'e E,
        caller: &'e Caller,
        protections: fn() -> Protections,
        start: InodeNumber,
    ) -> Self {
        let restriction = Restriction::default();
        Self {
            engine,
            caller,
            protections,
            here: start,
            known: None,
            links: 0,
            restriction,
            top: start,
            depth: 0,
            pins: Vec::new(),
        }
    }

    /// Restricts the walk, before its first step.
    pub(crate) fn restrict(&mut self, restriction: Restriction) {
        self.restriction = restriction;
    }

    /// Moves to another inode.
    fn restart(&mut self, start: InodeNumber) {
        self.here = start;
        self.known = None;
    }

    /// Attributes of the current inode.
    pub(crate) fn here(&mut self) -> Outcome<Attributes> {
        match self.known {
            Some(known) => Ok(known),
            None => {
                let attributes = self.engine.getattr(Target::Node(self.here))?;
                self.known = Some(attributes);
                Ok(attributes)
            }
        }
    }

    /// Resolves the whole path. Follows a symbolic link at its end if `follow` is set or if slashes follow the
    /// link.
    pub(crate) fn walk_to_end(&mut self, path: &[u8], follow: bool) -> Outcome<Attributes> {
        self.go(path, false, follow)?;
        self.here()
    }

    /// Resolves the whole path, without asking the engine for attributes that the walk did not return.
    pub(crate) fn walk_lazily(&mut self, path: &[u8], follow: bool) -> Outcome<()> {
        self.go(path, false, follow).map(|_| ())
    }

    /// Credentials of the caller.
    pub(crate) fn caller(&self) -> &'e Caller {
        self.caller
    }

    /// The current inode.
    pub(crate) fn at(&self) -> InodeNumber {
        self.here
    }

    /// Attributes of the current inode, if the walk returned them.
    pub(crate) fn known(&self) -> Option<Attributes> {
        self.known
    }

    /// Resolves all but the last component.
    pub(crate) fn walk_to_parent(&mut self, path: &[u8]) -> Outcome<Last> {
        let last = self.go(path, true, false)?;
        if let Some(here) = self.known {
            access::search(self.caller, &here)?;
        } else if !matches!(last.name(), Ok(Some(_))) {
            // With a name the engine makes the check; without a name this is the only check.
            self.search_here()?;
        }
        Ok(last)
    }

    /// Checks that the current inode is a directory that the caller may search.
    pub(crate) fn search_here(&mut self) -> Outcome<()> {
        let here = self.here()?;
        Ok(access::search(self.caller, &here)?)
    }

    /// Checks that `..` from the current inode stays beneath the start, if the walk has to.
    pub(crate) fn check_ascent(&self) -> Outcome<()> {
        let leaves = self.restriction.scope == Scope::Beneath && self.depth == 0;
        if leaves { Err(Error::CrossDevice.into()) } else { Ok(()) }
    }

    /// Continues with the target of a symbolic link at the end of the path, in the current directory.
    pub(crate) fn follow_to_parent(&mut self, link: &Attributes) -> Outcome<Last> {
        let path = self.link_target(link, true, b"")?;
        self.walk_to_parent(&path)
    }

    /// Path that results from putting the link's target in front of `rest`. `trailing`: the link is the end of the
    /// path.
    fn link_target(&mut self, link: &Attributes, trailing: bool, rest: &[u8]) -> Outcome<Vec<u8>> {
        self.links += 1;
        if self.links > LINKS_MAX {
            return Err(Error::Loop.into());
        }
        if trailing && link.uid != self.caller.uid {
            let directory = self.here()?;
            (self.protections)().follow(self.caller, &directory, link)?;
        }
        if self.restriction.no_links {
            return Err(Error::Loop.into());
        }
        let mut path = self.engine.readlink(link.inode)?;
        if !rest.is_empty() {
            path.push(b'/');
            path.extend_from_slice(rest);
        }
        if path.first() == Some(&b'/') {
            match self.restriction.scope {
                Scope::Anywhere => return Err(Stop::Leaves(Leaves { argument: 0, rest: path })),
                Scope::Beneath => return Err(Error::CrossDevice.into()),
                Scope::InRoot => {
                    self.restart(self.top);
                    self.depth = 0;
                }
            }
        }
        Ok(path)
    }

    fn go(&mut self, path: &[u8], stop_before_last: bool, follow: bool) -> Outcome<Last> {
        let mut path = path.to_vec();
        loop {
            let (components, slash) = split(&path);
            let (middle, last) = match components.split_last() {
                Some((last, middle)) if stop_before_last => (middle, last_of(last, slash)),
                _ => (&components[..], Last::Root),
            };
            let follow_last = stop_before_last || follow || slash;
            match self.components(middle, follow_last)? {
                None => {
                    let must_be_directory = slash && !stop_before_last;
                    if must_be_directory && self.here()?.file_type != FileType::Directory {
                        return Err(Error::NotDirectory.into());
                    }
                    return Ok(last);
                }
                Some(Halt::AtLink(link, taken)) => {
                    let trailing = !stop_before_last && taken == components.len();
                    path = self.link_target(&link, trailing, skip(&path, taken))?;
                }
                Some(Halt::AboveRoot(taken)) => {
                    let rest = skip(&path, taken).to_vec();
                    return Err(Stop::Leaves(Leaves { argument: 0, rest }));
                }
            }
        }
    }

    /// Takes the components up to the next symbolic link or the border of the tree.
    fn components(&mut self, components: &[&[u8]], follow_last: bool) -> Outcome<Option<Halt>> {
        let mut taken = 0;
        let restricted = self.restriction.scope != Scope::Anywhere;
        while taken < components.len() {
            if restricted && components[taken] == b".." && self.depth == 0 {
                self.search_here()?;
                if self.restriction.scope == Scope::Beneath {
                    return Err(Error::CrossDevice.into());
                }
                taken += 1;
                continue;
            }
            // In a restricted scope each step is counted.
            let batch = components[taken..].iter().take(if restricted { 1 } else { BATCH_STEPS });
            let steps: Vec<_> = batch.map_while(|component| step_of(component).ok()).collect();
            let end = self.steps(&steps)?;
            match end {
                None => {
                    taken += steps.len();
                    match steps.first() {
                        Some(Step::Child(_)) if restricted => self.depth += 1,
                        Some(Step::Parent) if restricted => self.depth -= 1,
                        _ => {}
                    }
                }
                Some(Halt::AboveRoot(count)) => return Ok(Some(Halt::AboveRoot(taken + count))),
                Some(Halt::AtLink(link, count)) => {
                    taken += count;
                    if taken < components.len() || follow_last {
                        return Ok(Some(Halt::AtLink(link, taken)));
                    }
                    self.restart(link.inode);
                    return Ok(None);
                }
            }
            if let Some(Err(refused)) = components.get(taken).map(|component| step_of(component)) {
                access::search(self.caller, &self.here()?)?;
                match refused {
                    Refused::Dot => taken += 1,
                    Refused::Error(error) => return Err(error.into()),
                }
            }
        }
        Ok(None)
    }

    /// Takes one batch. At a symbolic link the walker remains in the directory that contains the link.
    fn steps(&mut self, steps: &[Step<'_>]) -> Outcome<Option<Halt>> {
        if steps.is_empty() {
            return Ok(None);
        }
        let mut found = Vec::with_capacity(steps.len());
        let result = self.engine.walk(self.caller, self.here, steps, &mut found);
        self.pins.extend(found.iter().map(|attributes| attributes.inode));
        result?;
        let count = found.len();
        let link = found.pop_if(|end| end.file_type == FileType::Symlink);
        if let Some(end) = found.last() {
            self.here = end.inode;
            self.known = Some(*end);
        }
        Ok(match link {
            Some(link) => Some(Halt::AtLink(link, count)),
            None if count < steps.len() => Some(Halt::AboveRoot(count)),
            None => None,
        })
    }
}

/// Reason why a walk stopped before its last component, with the number of components taken.
enum Halt {
    /// The last component taken is a symbolic link, which must be followed.
    AtLink(Attributes, usize),
    /// The next component leads above the root.
    AboveRoot(usize),
}

/// Reason why a component is no step for the engine.
enum Refused {
    Dot,
    Error(Error),
}

fn step_of(component: &[u8]) -> Result<Step<'_>, Refused> {
    match component {
        b"." => Err(Refused::Dot),
        b".." => Ok(Step::Parent),
        _ => match Name::new(component) {
            Ok(name) => Ok(Step::Child(name)),
            Err(NameError::TooLong) => Err(Refused::Error(Error::NameTooLong)),
            Err(NameError::Invalid) => Err(Refused::Error(Error::Invalid)),
        },
    }
}

/// The components of a path; true if slashes follow the last one.
fn split(path: &[u8]) -> (Vec<&[u8]>, bool) {
    let components: Vec<_> = path.split(|byte| *byte == b'/').filter(|part| !part.is_empty()).collect();
    (components, path.last() == Some(&b'/'))
}

fn last_of(component: &[u8], slash: bool) -> Last {
    match component {
        b"." => Last::Dot,
        b".." => Last::DotDot,
        name => Last::Name(name.to_vec(), slash),
    }
}

/// The path after `count` components, with its trailing slashes; a single `/` if only slashes follow.
fn skip(path: &[u8], count: usize) -> &[u8] {
    let mut rest = path;
    for _ in 0..count {
        let start = rest.iter().position(|byte| *byte != b'/').unwrap_or(rest.len());
        let after = rest[start..].iter().position(|byte| *byte == b'/').map_or(rest.len(), |at| start + at);
        rest = &rest[after..];
    }
    match rest.iter().position(|byte| *byte != b'/') {
        Some(start) => &rest[start..],
        None => &rest[..rest.len().min(1)],
    }
}
