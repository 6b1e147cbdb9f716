//! A cluster on this machine, as it lies in a folder:
//!
//! ```text
//! DIR/hearth.toml       what was chosen when it was made
//! DIR/n1                where the tree of node 1 is seen; there only while it is mounted ([`crate::mountpoint`])
//! DIR/node-1/pool       its pool, unless the medium is memory and DIR is not
//! DIR/node-1/socket     where programs attach
//! DIR/node-1/control    where `hearth status` asks
//! DIR/node-1/lead       where any user asks which node leads, if there are several
//! DIR/node-1/serve.pid  its daemon, once it serves
//! DIR/node-1/serve.lock held by its keeper and its daemon, also one that begins ([`crate::daemon_lock`])
//! DIR/node-1/standby.lock held by the parents of standby programs ([`crate::standby_lock`])
//! DIR/node-1/keeper.pid its keeper, which starts the daemon again when it dies
//! DIR/node-1/serve.log  what both say; from 8 MiB on a new one begins, and serve.log.old is the one before ([`crate::log_file`])
//! DIR/node-1/pool-made  that there is a pool: an empty folder is one that was lost
//! DIR/node-1/gateway.pid the process that serves its mount
//! DIR/node-1/gateway.ends the same process, when it has begun to end
//! DIR/node-1/failure    why the last daemon ended of itself or could not begin, since its keeper began
//! ```
//!
//! A cluster of several nodes has a folder `node-K` for each, and
//!
//! ```text
//! DIR/key               the cluster's key
//! DIR/manager           what the cluster manager keeps, and its socket
//! DIR/manager.pid       the cluster manager
//! DIR/manager-keeper.pid its keeper
//! DIR/manager.log       what both say
//! ```

use crate::chain::settings::ChainSettings;
use crate::error::{Error, Result};
use crate::limits::Limits;
use crate::making::CreatedFiles;
use crate::say::{self, quoted};
use crate::settings::{Written, WrittenNode};
use rustix::fs::{FsWord, OFlags, statfs, statvfs};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// `f_type` of the file systems in memory.
const TMPFS: FsWord = 0x0102_1994;
const RAMFS: FsWord = 0x8584_58f6;

/// Longest path that a Unix socket's address holds, less one for the closing zero byte.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Longest settings. Those of 1,000 nodes take 100 KiB.
const SETTINGS_BYTES_MAX: u64 = 1 << 20;

/// The contents of [`Cluster::pool_made_file`] from when a node's pool was lost.
pub const POOL_LOST: &str = "lost";
/// Pools in memory elsewhere of clusters that were in one folder, at most.
const POOLS_MAX: u32 = 100;

/// Where a pool's bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MediumKind {
    /// Files on any file system: survives a power cut, with what was synced, unless that file system is in memory.
    File,
    /// Files in memory: survives programs and daemons, ends with the machine.
    Memory,
}

/// One node; its paths are absolute.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its number, from 1.
    pub number: u32,
    /// Folder of its pool.
    pub pool: PathBuf,
    /// Where programs attach.
    pub socket: PathBuf,
}

impl Node {
    /// Bytes that the pool takes where it lies.
    pub fn pool_bytes(&self) -> u64 {
        let files = fs::read_dir(&self.pool).into_iter().flatten().flatten();
        files.filter_map(|file| Some(file.metadata().ok()?.blocks() * 512)).sum()
    }
}

impl std::fmt::Display for MediumKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::Memory => "memory",
        })
    }
}

/// The settings in `hearth.toml`, in the folder where it is now.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Medium of all pools.
    pub medium: MediumKind,
    /// Data that a pool may hold, in bytes.
    pub capacity_bytes: u64,
    /// Whether its nodes are mounted when they start, if they may be.
    pub mount: bool,
    /// Bounds.
    pub limits: Limits,
    /// The settings that several nodes share.
    pub chain: Option<ChainSettings>,
    /// The nodes.
    pub nodes: Vec<Node>,
}

/// A cluster's folder with its settings.
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The folder, absolute and without symbolic links.
    pub dir: PathBuf,
    /// The settings.
    pub settings: Settings,
}

impl Cluster {
    /// The folder that is meant when none is named: `$HEARTH_DIR`, else `~/.hearth`.
    ///
    /// # Errors
    /// There is no home folder.
    pub fn default_dir() -> Result<PathBuf> {
        if let Some(dir) = std::env::var_os("HEARTH_DIR").filter(|dir| !dir.is_empty()) {
            return Ok(dir.into());
        }
        let home =
            std::env::home_dir().ok_or_else(|| Error::new("no home folder is known: say --dir DIR"))?;
        Ok(home.join(".hearth"))
    }

    /// Reads the cluster in a folder.
    ///
    /// # Errors
    /// There is none, or its settings cannot be read.
    pub fn open(dir: &Path) -> Result<Self> {
        let text = Self::text_of(dir)?;
        Self::of(dir, Written::parse(&dir.join("hearth.toml"), &text?)?)
    }

    /// The same for a command that does not start anything: if the settings cannot be understood, it gets the cluster as its
    /// folders and its processes tell of it, and why. Such a cluster is never written down.
    ///
    /// # Errors
    /// There is none, or its settings cannot be read.
    pub fn open_or_found(dir: &Path) -> Result<(Self, Option<Error>)> {
        let (text, written) = match Self::text_of(dir)? {
            Ok(text) => {
                let written = Written::parse(&dir.join("hearth.toml"), &text);
                (text, written)
            }
            Err(why) => (String::new(), Err(why)),
        };
        match written {
            Ok(written) => Ok((Self::of(dir, written)?, None)),
            Err(why) => match crate::found::cluster(dir, &text) {
                Some(found) => Ok((found, Some(why))),
                None => Err(why),
            },
        }
    }

    /// The text of the settings, or why what is there cannot be one.
    ///
    /// # Errors
    /// There is no cluster, or this user may not read its settings.
    fn text_of(dir: &Path) -> Result<Result<String>> {
        let file = dir.join("hearth.toml");
        let opened = open_settings(dir).map_err(|why| match why.kind() {
            ErrorKind::NotFound if dir.join("manager").is_dir() => Error::new(format!(
                "there are no nodes in {dir}, only a cluster manager: hearth cluster status --dir {dir} asks it",
                dir = quoted(dir)
            )),
            ErrorKind::NotFound => {
                Error::new(format!("there is no cluster in {} (hearth up makes one)", dir.display()))
            }
            _ => Error::at("read", &file)(why),
        })?;
        let is_wrong =
            |why: &str| Ok(Err(Error::new(format!("cannot understand {}: {why}", file.display()))));
        match opened.metadata() {
            Ok(found) if !found.is_file() => return is_wrong("it is not a file"),
            Ok(found) if found.len() > SETTINGS_BYTES_MAX => return is_wrong("it is longer than 1 MiB"),
            _ => {}
        }
        let mut bytes = Vec::new();
        opened.take(SETTINGS_BYTES_MAX).read_to_end(&mut bytes).map_err(Error::at("read", &file))?;
        String::from_utf8(bytes).map(Ok).or_else(|why| {
            let line = why.as_bytes()[..why.utf8_error().valid_up_to()]
                .iter()
                .filter(|byte| **byte == b'\n')
                .count()
                + 1;
            is_wrong(&format!("line {line}: the text is not UTF-8"))
        })
    }

    fn of(dir: &Path, written: Written) -> Result<Self> {
        let dir = dir.canonicalize().map_err(Error::at("find", dir))?;
        let nodes = written.nodes.iter().map(|node| node.node(&dir)).collect::<Result<Vec<_>>>()?;
        let Written { medium, capacity_bytes, mount, limits, chain, .. } = written;
        let settings = Settings { medium, capacity_bytes, mount, limits, chain, nodes };
        Ok(Self { dir, settings })
    }

    /// False if its settings were removed, as by `hearth remove`.
    pub fn exists(&self) -> bool {
        // Settings that cannot be looked at now are there.
        self.dir.join("hearth.toml").try_exists().unwrap_or(true)
    }

    /// Makes the folder of a new cluster of so many nodes, of several with what they share; each pool is made by its daemon's first start.
    ///
    /// # Errors
    /// A folder or the settings cannot be written.
    pub fn create(
        dir: &Path,
        (medium, capacity_bytes): (MediumKind, u64),
        (nodes, chain): (u32, Option<ChainSettings>),
        made: &mut CreatedFiles,
    ) -> Result<Self> {
        made.shared(dir)?;
        let dir = dir.canonicalize().map_err(Error::at("find", dir))?;
        let nodes =
            (1..=nodes).map(|number| create_node(&dir, number, medium, made)).collect::<Result<_>>()?;
        let limits = Limits::default();
        let settings = Settings { medium, capacity_bytes, mount: true, limits, chain, nodes };
        let cluster = Self { dir, settings };
        if cluster.settings.chain.is_some() {
            crate::chain::make_files(&cluster.dir, made)?;
        }
        made.file(cluster.dir.join("hearth.toml"));
        // Last: a folder without it is no cluster yet, and `up` begins again.
        cluster.save()?;
        Ok(cluster)
    }

    /// Makes the folders of more nodes, up to so many, and remembers the nodes; [`Self::save`] makes them the cluster's.
    ///
    /// # Errors
    /// A folder cannot be made.
    pub fn add_nodes(&mut self, nodes: u32, made: &mut CreatedFiles) -> Result<()> {
        let first = self.settings.nodes.iter().map(|node| node.number).max().unwrap_or(0) + 1;
        let medium = self.settings.medium;
        let new = (first..=nodes).map(|number| create_node(&self.dir, number, medium, made));
        let new = new.collect::<Result<Vec<_>>>()?;
        self.settings.nodes.extend(new);
        Ok(())
    }

    /// Writes the settings down, in one step, which is durable when this returns.
    ///
    /// # Errors
    /// They cannot be written.
    pub fn save(&self) -> Result<()> {
        let Settings { medium, capacity_bytes, mount, limits, chain, nodes } = self.settings.clone();
        let nodes = nodes.iter().map(|node| WrittenNode::of(&self.dir, node)).collect::<Result<_>>()?;
        let text = toml::to_string(&Written { medium, capacity_bytes, mount, limits, chain, nodes })
            .map_err(|why| Error::new(format!("cannot write settings: {why}")))?;
        let (file, unfinished) = (self.dir.join("hearth.toml"), self.dir.join("hearth.toml.new"));
        let written = fs::File::create(&unfinished);
        let written =
            written.and_then(|mut new| new.write_all(text.as_bytes()).and_then(|()| new.sync_all()));
        written.map_err(Error::at("write", &unfinished))?;
        fs::rename(&unfinished, &file).map_err(Error::at("write", &file))?;
        fs::File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(Error::at("write", &file))
    }

    /// Called before a node is started: a socket elsewhere needs its folder, which goes with the runtime folder, and
    /// has to be where other processes look for it, also after the cluster was moved.
    ///
    /// # Errors
    /// The folder cannot be made, or the settings not written.
    pub fn make_socket_folder(&self, node: &Node) -> Result<()> {
        let Some(private) = node.socket.parent().filter(|private| !private.starts_with(&self.dir)) else {
            return Ok(());
        };
        fs::DirBuilder::new()
            .mode(0o711)
            .recursive(true)
            .create(private)
            .map_err(Error::at("make", private))?;
        self.check_owner(private)?;
        self.save()
    }

    /// Other users may make folders where the socket's folder lies, under a name that they can work out.
    fn check_owner(&self, private: &Path) -> Result<()> {
        let found = fs::symlink_metadata(private).map_err(Error::at("look at", private))?;
        let own = fs::metadata(&self.dir).map_err(Error::at("look at", &self.dir))?.uid();
        let users = [0, rustix::process::geteuid().as_raw(), own];
        if found.is_dir() && users.contains(&found.uid()) {
            return Ok(());
        }
        Err(Error::new(format!(
            "{}, the folder for the sockets of this cluster, belongs to another user or is a link: remove it, or move the \
             cluster to a folder with a shorter path",
            private.display()
        )))
    }

    /// After a node has ended: removes what lies outside of the cluster's folder and is of no use without a daemon, which is
    /// the folder of a socket elsewhere.
    pub fn remove_socket_folder(&self, node: &Node) {
        let Some(private) = node.socket.parent().filter(|private| !private.starts_with(&self.dir)) else {
            return;
        };
        // Those of processes that were killed.
        for socket in [&node.socket, &self.control(node), &self.orders(node), &self.lead(node)] {
            let _ = fs::remove_file(socket);
        }
        let _ = fs::remove_dir(private);
    }

    /// The node with this number.
    ///
    /// # Errors
    /// The cluster has none.
    pub fn node(&self, number: u32) -> Result<&Node> {
        self.settings.nodes.iter().find(|node| node.number == number).ok_or_else(|| {
            Error::new(format!("node {number} does not exist: there are {}", self.settings.nodes.len()))
        })
    }

    /// A sentence on a pool that has more than it may hold, because the capacity was made smaller since.
    pub fn capacity_warning(&self, node: &Node) -> Option<String> {
        let capacity = self.settings.capacity_bytes;
        let entries = fs::read_dir(&node.pool).into_iter().flatten().flatten();
        let segments = entries
            .filter(|entry| entry.file_name().to_str().is_some_and(|name| name.starts_with("segment-")));
        let made: u64 = segments.filter_map(|entry| Some(entry.metadata().ok()?.len())).sum();
        // Segments have a head beside their data.
        (made > capacity + capacity / 16).then(|| {
            format!(
                "capacity_bytes = {capacity} in hearth.toml, and the files of {} for data have {made} bytes already: writes may \
                 get ENOSPC until files are removed or the capacity is larger",
                node.pool.display()
            )
        })
    }

    /// The node's own folder.
    pub fn folder(&self, node: &Node) -> PathBuf {
        self.dir.join(format!("node-{}", node.number))
    }

    /// Where the node's tree is seen.
    pub fn tree(&self, node: &Node) -> PathBuf {
        self.dir.join(format!("n{}", node.number))
    }

    /// Is there once the node's pool was made.
    pub fn pool_made_file(&self, node: &Node) -> PathBuf {
        self.folder(node).join("pool-made")
    }

    /// Whether the node had a pool that was lost, and has another one since.
    pub fn pool_was_lost(&self, node: &Node) -> bool {
        fs::read_to_string(self.pool_made_file(node)).is_ok_and(|text| text == POOL_LOST)
    }

    /// Says which process the daemon is.
    pub fn pid_file(&self, node: &Node) -> PathBuf {
        self.folder(node).join("serve.pid")
    }

    /// Says which process the daemon's keeper is.
    pub fn keeper_pid_file(&self, node: &Node) -> PathBuf {
        self.folder(node).join("keeper.pid")
    }

    /// Says why a daemon ended of itself, or could not begin.
    pub fn failure_file(&self, node: &Node) -> PathBuf {
        self.folder(node).join("failure")
    }

    /// Its contents, if there are some. If there was no space for the reason, the file is empty.
    pub fn failure(&self, node: &Node) -> Option<String> {
        let failure = fs::read_to_string(self.failure_file(node)).ok()?;
        if !failure.is_empty() {
            return Some(failure);
        }
        let folder = self.folder(node);
        let is_full = statvfs(&folder).is_ok_and(|disk| disk.f_bavail == 0);
        let now = if is_full { "no space is left" } else { "there may have been no space" };
        Some(format!("the reason could not be written, and {now} in {}", folder.display()))
    }

    /// The largest failure that synced data survives, as `hearth status` reports it: `process` or `power`.
    ///
    /// # Errors
    /// The pool's folder cannot be looked at.
    pub fn survives(&self, node: &Node) -> Result<&'static str> {
        let in_memory = self.settings.medium == MediumKind::Memory || is_in_memory(&node.pool)?;
        Ok(if in_memory { "process" } else { "power" })
    }

    /// Where `hearth status` asks the daemon.
    pub fn control(&self, node: &Node) -> PathBuf {
        node.socket.with_extension("control")
    }

    /// Where any user may ask the daemon of one of several nodes which of them leads.
    pub fn lead(&self, node: &Node) -> PathBuf {
        node.socket.with_extension("lead")
    }

    /// Where the daemon of one of several nodes is told what to do; the path is as long as the other one.
    pub fn orders(&self, node: &Node) -> PathBuf {
        node.socket.with_extension("command")
    }
}

/// Opens the settings of a cluster, or what is in their place: a pipe is not waited for.
pub fn open_settings(dir: &Path) -> std::io::Result<File> {
    File::options().read(true).custom_flags(OFlags::NONBLOCK.bits() as i32).open(dir.join("hearth.toml"))
}

/// The folders of a new node.
fn create_node(dir: &Path, number: u32, medium: MediumKind, made: &mut CreatedFiles) -> Result<Node> {
    let folder = dir.join(format!("node-{number}"));
    made.own(&folder, 0o777)?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o711))
        .map_err(Error::at("set mode of", &folder))?;
    let pool = pool_folder(&folder, medium)?;
    made.own(&pool, 0o700)?;
    let socket = socket_path(&folder);
    if let Some(private) = socket.parent().filter(|parent| *parent != folder) {
        made.own(private, 0o711)?;
    }
    Ok(Node { number, pool, socket })
}

/// Whether a folder's files end with the machine.
fn is_in_memory(folder: &Path) -> Result<bool> {
    let kind = statfs(folder).map_err(Error::at("look at", folder))?.f_type;
    Ok(kind == TMPFS || kind == RAMFS)
}

/// A pool that lies in the node's folder.
pub fn pool_within(folder: &Path) -> PathBuf {
    folder.join("pool")
}

/// A pool in memory needs a tmpfs: the node's folder if it lies on one, else a folder below /dev/shm. That does not go
/// with the cluster's folder, so it may hold the pool of a cluster that is gone, or was moved: it stays, and another name
/// is taken.
fn pool_folder(folder: &Path, medium: MediumKind) -> Result<PathBuf> {
    let here = pool_within(folder);
    if medium == MediumKind::File || is_in_memory(folder)? {
        return Ok(here);
    }
    let name = format!("hearth-{}-{:016x}", rustix::process::getuid().as_raw(), fingerprint(folder));
    let own = |found: &fs::Metadata| found.is_dir() && found.uid() == rustix::process::getuid().as_raw();
    let is_free = |pool: &PathBuf| match fs::symlink_metadata(pool) {
        Err(why) => why.kind() == ErrorKind::NotFound,
        // All users may make a folder there.
        Ok(found) => own(&found) && fs::read_dir(pool).is_ok_and(|mut files| files.next().is_none()),
    };
    let numbered = |number: u32| match number {
        1 => name.clone(),
        more => format!("{name}-{more}"),
    };
    let mut names = (1..=POOLS_MAX).map(|number| Path::new("/dev/shm").join(numbered(number)));
    let mut left = Vec::new();
    let found = names.find(|pool| {
        let free = is_free(pool);
        left.extend((!free).then(|| pool.display().to_string()));
        free
    });
    if !left.is_empty() {
        say::aside(format_args!(
            "hearth: {} holds the pool of a cluster that was in this folder before: remove it, if nothing in it is needed",
            left.join(", ")
        ));
    }
    found.ok_or_else(|| Error::new(format!("{POOLS_MAX} pools of clusters that are gone lie in /dev/shm")))
}

/// In the node's folder, or, if that path is too long for an address, in the user's runtime folder.
pub fn socket_path(folder: &Path) -> PathBuf {
    let here = folder.join("socket");
    if here.with_extension("control").as_os_str().len() <= SOCKET_PATH_BYTES_MAX {
        return here;
    }
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map_or_else(|| PathBuf::from("/tmp"), PathBuf::from);
    let private =
        runtime.join(format!("hearth-{}-{:016x}", rustix::process::getuid().as_raw(), fingerprint(folder)));
    private.join("socket")
}

/// Tells folders apart in names.
pub fn fingerprint(folder: &Path) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    folder.hash(&mut hasher);
    hasher.finish()
}
