//! Guard against the loss of mapped pool files: a process that has the right truncates them, or their medium fails.
//!
//! An access to a lost page raises SIGBUS, which ends the process. In a process with a guarded medium
//! ([`crate::Medium::guarded`]) a handler finds the region of the address, marks it as lost, and replaces its whole
//! mapping by zero pages that belong to no file, so that the access completes. Later reads and writes of the region
//! are meaningless: the caller must check the region before it decides by them ([`crate::Region::check`]; reads and
//! [`crate::Region::sync`] check by themselves). A lost region stays lost.
//!
//! The mark is set before the zeros appear, so a thread that read zeros finds the mark. The handler takes no lock
//! and allocates nothing: it reads a fixed table of the guarded regions, each entry behind a version that is odd
//! while the entry changes. A lock of its own protects changes of the table; no region is accessed under it. Faults
//! at other addresses, and signals sent by a process, are forwarded to the previous handler. Table and handler are
//! global to the process, because a signal handler has no other way to find the regions.
//!
//! A mapping for reading a file whose owner may truncate it is in the table without a region
//! ([`crate::Region::map_for_reading`]): a copy from it ends with an error where the file is gone ([`crate::copy`]), and
//! nothing is lost.

use crate::MediaError;
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};

/// Limit of guarded regions in a process.
const REGIONS_MAX: usize = 1 << 14;
/// Mappings for reading use these entries only, because they can be done without.
const COPIES_MAX: usize = REGIONS_MAX / 4 * 3;

/// State of the guarded files of one medium.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// Set once a file was lost.
    lost: AtomicBool,
    /// Files that are mapped, and files that were lost.
    files: Mutex<Vec<Arc<File>>>,
}

/// One guarded file.
#[derive(Debug)]
struct File {
    name: String,
    lost: AtomicBool,
    watch: Arc<Watch>,
}

impl File {
    fn mark_lost(&self) {
        self.lost.store(true, Ordering::SeqCst);
        self.watch.lost.store(true, Ordering::SeqCst);
    }
}

impl Watch {
    /// The first lost file, of those for which `counts` is true.
    pub fn lost(&self, counts: impl Fn(&str) -> bool) -> Option<String> {
        if !self.lost.load(Ordering::SeqCst) {
            return None;
        }
        let files = self.files();
        let lost = files.iter().find(|file| file.lost.load(Ordering::SeqCst) && counts(&file.name));
        lost.map(|file| file.name.clone())
    }

    fn files(&self) -> MutexGuard<'_, Vec<Arc<File>>> {
        // The list is consistent after every step of a change.
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard of a mapping, dropped before the mapping.
pub(crate) struct Guard {
    entry: &'static Entry,
    file: Arc<File>,
}

impl Guard {
    /// Guards the pages of a mapping.
    ///
    /// # Errors
    /// `Os` (ENOMEM): the limit of guarded regions is reached.
    pub fn new(watch: &Arc<Watch>, name: &str, start: usize, bytes: usize) -> Result<Self, MediaError> {
        let file = File { name: name.to_owned(), lost: AtomicBool::new(false), watch: watch.clone() };
        let file = Arc::new(file);
        let entry = Entry::add(&TABLE, start, start + bytes, Arc::as_ptr(&file).cast_mut())?;
        watch.files().push(file.clone());
        Ok(Self { entry, file })
    }

    /// True if an access to the mapping failed.
    #[inline]
    pub fn is_lost(&self) -> bool {
        // SeqCst, like all words of the handler: on the supported machines such a load costs no more than any
        // other.
        self.file.lost.load(Ordering::SeqCst)
    }

    /// The caller has found that a part of the file is gone.
    pub fn mark_lost(&self) {
        self.file.mark_lost();
    }

    /// Guard of the files of the medium.
    #[inline]
    pub fn watch(&self) -> &Arc<Watch> {
        &self.file.watch
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.entry.remove();
        self.file.watch.files().retain(|other| !Arc::ptr_eq(other, &self.file) || self.is_lost());
    }
}

/// Guard of a mapping for reading, dropped before the mapping: copies from it end with an error where the file is gone.
pub(crate) struct CopyGuard(&'static Entry);

impl CopyGuard {
    /// True if the handler can end copies on this processor.
    pub const WORKS: bool = cfg!(target_arch = "x86_64");

    /// Guards the pages of a mapping. The handler must be installed.
    ///
    /// # Errors
    /// `Os` (ENOMEM): the limit of guarded regions is reached.
    pub fn new(start: usize, bytes: usize) -> Result<Self, MediaError> {
        Entry::add(&TABLE[..COPIES_MAX], start, start + bytes, null_mut()).map(Self)
    }
}

impl Drop for CopyGuard {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// A guarded mapping, for the handler.
struct Entry {
    /// Odd while the other fields change.
    version: AtomicUsize,
    start: AtomicUsize,
    /// Zero in a free entry.
    end: AtomicUsize,
    /// Valid as long as the entry refers to it; null if copies end with an error.
    file: AtomicPtr<File>,
}

static TABLE: [Entry; REGIONS_MAX] = [const {
    Entry {
        version: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        file: AtomicPtr::new(null_mut()),
    }
}; REGIONS_MAX];

/// Locks the table for a change.
fn change() -> MutexGuard<'static, ()> {
    static CHANGE: Mutex<()> = Mutex::new(());
    CHANGE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    fn add(
        entries: &'static [Self],
        start: usize,
        end: usize,
        file: *mut File,
    ) -> Result<&'static Self, MediaError> {
        let _changing = change();
        let free = entries.iter().find(|entry| entry.end.load(Ordering::SeqCst) == 0);
        let entry = free.ok_or(MediaError::Os(libc::ENOMEM))?;
        entry.set(start, end, file);
        Ok(entry)
    }

    fn remove(&self) {
        let _changing = change();
        self.set(0, 0, null_mut());
    }

    /// The caller holds the lock of the table.
    fn set(&self, start: usize, end: usize, file: *mut File) {
        self.version.fetch_add(1, Ordering::SeqCst);
        self.start.store(start, Ordering::SeqCst);
        self.end.store(end, Ordering::SeqCst);
        self.file.store(file, Ordering::SeqCst);
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// The mapping that contains the address; `None` if the entry changes meanwhile. The entry of a mapping that is
    /// being accessed does not change.
    fn holding(&self, address: usize) -> Option<(usize, usize, *const File)> {
        let version = self.version.load(Ordering::SeqCst);
        let (start, end) = (self.start.load(Ordering::SeqCst), self.end.load(Ordering::SeqCst));
        let file = self.file.load(Ordering::SeqCst).cast_const();
        let whole = version.is_multiple_of(2) && self.version.load(Ordering::SeqCst) == version;
        (whole && (start..end).contains(&address)).then_some((start, end, file))
    }
}

/// Previous handler of SIGBUS: stored before the new one is installed.
static BEFORE: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static BEFORE_FLAGS: AtomicI32 = AtomicI32::new(0);

/// Installs the handler, once in a process and for ever.
pub(crate) fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the structure is a local one, and plain data that may be zero.
        let before = unsafe {
            let asked = libc::sigaction(libc::SIGBUS, std::ptr::null(), before.as_mut_ptr());
            assert!(asked == 0, "SIGBUS is a signal that can be asked for");
            before.assume_init()
        };
        BEFORE.store(before.sa_sigaction, Ordering::SeqCst);
        BEFORE_FLAGS.store(before.sa_flags, Ordering::SeqCst);
        // SAFETY: as above.
        let mut ours = unsafe { MaybeUninit::<libc::sigaction>::zeroed().assume_init() };
        ours.sa_sigaction = on_bus as *const () as usize;
        // On the alternate signal stack, if the thread has one: the previous handler may need it.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler takes what SA_SIGINFO gives, and does only what a handler may.
        let installed = unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, null_mut()) };
        assert!(installed == 0, "SIGBUS is a signal that can be handled");
    });
}

unsafe extern "C" fn on_bus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel provides the structure; the errno location is that of this thread.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr() as usize, libc::__errno_location()) };
    let of_access = matches!(code, libc::BUS_ADRERR | libc::BUS_MCEERR_AR);
    // SAFETY: as above.
    let errno_before = unsafe { *errno };
    let handled = of_access
        && match TABLE.iter().find_map(|entry| entry.holding(address)) {
            // SAFETY: the kernel gives the context of the interrupted code.
            Some((_, _, file)) if file.is_null() => unsafe { end_copy(context) },
            Some(mapping) => lose(mapping),
            None => false,
        };
    // SAFETY: as above; errno is restored for the interrupted code.
    unsafe { *errno = errno_before };
    if !handled {
        // SAFETY: the arguments are those of the kernel.
        unsafe { pass_on(signal, info, context) };
    }
}

/// Marks the region of a mapping that is being accessed, and replaces its pages by zeros; false if there is no memory.
fn lose((start, end, file): (usize, usize, *const File)) -> bool {
    // SAFETY: the mapping is being accessed, so its guard lives, and the file with it.
    let file = unsafe { &*file };
    file.mark_lost();
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the pages are those of the guarded mapping, which lends no references and is unmapped as a whole.
    let zeros = unsafe { libc::mmap(start as *mut libc::c_void, end - start, rights, flags, -1, 0) };
    zeros != libc::MAP_FAILED
}

/// Lets a copy that faulted return an error; false if it was other code.
///
/// # Safety
/// `context` is that of the interrupted code, as the kernel gave it to the handler.
#[cfg(target_arch = "x86_64")]
unsafe fn end_copy(context: *mut libc::c_void) -> bool {
    // SAFETY: as the caller promised.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let instruction = &mut registers[libc::REG_RIP as usize];
    let landing = crate::copy::landing_of(instruction.cast_unsigned() as usize);
    if let Some(landing) = landing {
        *instruction = (landing as u64).cast_signed();
    }
    landing.is_some()
}

/// On other processors copies do not end by faults.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn end_copy(_context: *mut libc::c_void) -> bool {
    false
}

/// Does what the process would have done without this handler.
unsafe fn pass_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    type WithInfo = unsafe extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
    type Plain = unsafe extern "C" fn(i32);
    // SAFETY: the kernel gave the structure.
    let code = unsafe { (*info).si_code };
    // The access is not repeated in either case.
    let sent = code <= 0 || code == libc::BUS_MCEERR_AO;
    match BEFORE.load(Ordering::SeqCst) {
        libc::SIG_IGN if sent => {}
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: numbers only. The access happens again, or the signal is raised again, without a handler.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if sent {
                    libc::raise(signal);
                }
            }
        }
        handler if BEFORE_FLAGS.load(Ordering::SeqCst) & libc::SA_SIGINFO != 0 => {
            // SAFETY: it was installed as a handler that takes all three.
            unsafe { std::mem::transmute::<usize, WithInfo>(handler)(signal, info, context) };
        }
        handler => {
            // SAFETY: it was installed as a handler that takes the number.
            unsafe { std::mem::transmute::<usize, Plain>(handler)(signal) };
        }
    }
}
