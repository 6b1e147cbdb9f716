//! Bindings of the C functions in `shim/fabric.c`, and the memory that is passed to libfabric.
//!
//! Callers follow three rules of libfabric. A domain outlives everything that was created in it: all such objects
//! hold a [`Domain`]. The two halves of an endpoint, for posting and for completions, are each used under a lock, and
//! not after their close ([`super::link`]). Registered memory stays mapped until its registration is closed
//! ([`Registered`]).

use crate::error::Error;
use crate::memory::Rights;
use pmem::Region;
use std::ffi::{CString, c_int, c_void};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// The code by which a provider reports a full queue.
const AGAIN: c_int = libc::EAGAIN;

#[repr(C)]
pub(super) struct RawDomain {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct RawListener {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct RawInfo {
    _opaque: [u8; 0],
}

#[repr(C)]
struct RawRegistration {
    _opaque: [u8; 0],
}

/// Properties of a provider.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Facts {
    /// Bytes of an immediate: four over verbs, eight over tcp.
    pub immediate_bytes: u64,
    /// Bytes that may be posted from memory that is not registered.
    pub inline_bytes: u64,
    /// Remote memory is named by its address (1), or by its offset (0).
    pub virtual_addresses: u32,
    /// 1 if an immediate uses up a posted receive.
    pub immediate_uses_receive: u32,
}

/// An event of a connection as a whole.
#[repr(C)]
pub(super) struct RawEvent {
    pub kind: u32,
    pub error: i32,
    pub endpoint: *mut c_void,
    pub info: *mut RawInfo,
    pub data_bytes: u64,
    pub data: [u8; 256],
}

pub(super) const WANTS_IN: u32 = 1;
pub(super) const CONNECTED: u32 = 2;
pub(super) const GONE: u32 = 3;
pub(super) const FAILED: u32 = 4;

/// A completed operation or an arrival.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Completion {
    pub context: u64,
    pub bytes: u64,
    pub immediate: u64,
    pub kind: u32,
    pub error: i32,
}

pub(super) const DONE: u32 = 1;
pub(super) const FRAME: u32 = 2;
pub(super) const IMMEDIATE: u32 = 3;

/// The two halves of an endpoint: for posting, and for completions.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct RawEndpoint {
    pub posting: *mut c_void,
    pub completions: *mut c_void,
    /// 1 if several descriptors report events of its queue, 0 for one descriptor.
    has_list: u32,
}

/// Limit of the descriptors that report events of a queue.
pub(super) const DESCRIPTORS: usize = 8;

unsafe extern "C" {
    fn hf_domain_open(
        provider: *const libc::c_char,
        ip: *const libc::c_char,
        sends: u64,
        receives: u64,
        out: *mut *mut RawDomain,
    ) -> c_int;
    fn hf_domain_close(domain: *mut RawDomain);
    fn hf_facts(domain: *mut RawDomain, facts: *mut Facts);
    fn hf_eq_descriptor(domain: *mut RawDomain) -> c_int;
    fn hf_eq_may_sleep(domain: *mut RawDomain) -> c_int;
    fn hf_eq_read(domain: *mut RawDomain, event: *mut RawEvent) -> c_int;
    fn hf_pep_open(
        domain: *mut RawDomain,
        ip: *const libc::c_char,
        port: u16,
        out: *mut *mut RawListener,
    ) -> c_int;
    fn hf_pep_listen(domain: *mut RawDomain, listener: *mut RawListener) -> c_int;
    fn hf_pep_port(listener: *mut RawListener, port: *mut u16) -> c_int;
    fn hf_pep_close(listener: *mut RawListener);
    fn hf_reject(
        domain: *mut RawDomain,
        listener: *mut RawListener,
        info: *mut RawInfo,
        data: *const c_void,
        bytes: u64,
    );
    fn hf_info_free(domain: *mut RawDomain, info: *mut RawInfo);
    fn hf_endpoint_close(endpoint: *mut RawEndpoint);
    fn hf_endpoint_accepting(
        domain: *mut RawDomain,
        info: *mut RawInfo,
        completions: u64,
        out: *mut RawEndpoint,
    ) -> c_int;
    fn hf_endpoint_connecting(
        domain: *mut RawDomain,
        listener: *mut RawListener,
        ip: *const libc::c_char,
        port: u16,
        completions: u64,
        out: *mut RawEndpoint,
    ) -> c_int;
    fn hf_accept(endpoint: *const RawEndpoint) -> c_int;
    fn hf_connect(
        endpoint: *const RawEndpoint,
        ip: *const libc::c_char,
        port: u16,
        data: *const c_void,
        bytes: u64,
    ) -> c_int;
    fn hf_cq_descriptors(endpoint: *const RawEndpoint, out: *mut libc::pollfd, most: u64) -> c_int;
    fn hf_cq_may_sleep(domain: *mut RawDomain, endpoint: *const RawEndpoint) -> c_int;
    fn hf_cq_read(endpoint: *const RawEndpoint, out: *mut Completion, most: u64) -> c_int;
    fn hf_register(
        domain: *mut RawDomain,
        start: *mut c_void,
        bytes: u64,
        remote_write: u32,
        remote_read: u32,
        wanted_key: u64,
        out: *mut *mut RawRegistration,
        descriptor: *mut *mut c_void,
        key: *mut u64,
    ) -> c_int;
    fn hf_unregister(registration: *mut RawRegistration);
    fn hf_receive(
        endpoint: *const RawEndpoint,
        to: *mut c_void,
        bytes: u64,
        descriptor: *mut c_void,
        context: u64,
    ) -> c_int;
    fn hf_send(
        endpoint: *const RawEndpoint,
        from: *const c_void,
        bytes: u64,
        descriptor: *mut c_void,
        context: u64,
        copied: u32,
    ) -> c_int;
    fn hf_write(
        endpoint: *const RawEndpoint,
        from: *const c_void,
        bytes: u64,
        descriptor: *mut c_void,
        address: u64,
        key: u64,
        context: u64,
        copied: u32,
        has_immediate: u32,
        immediate: u64,
    ) -> c_int;
    fn hf_read(
        endpoint: *const RawEndpoint,
        to: *mut c_void,
        bytes: u64,
        descriptor: *mut c_void,
        address: u64,
        key: u64,
        context: u64,
    ) -> c_int;
}

fn check(call: &'static str, code: c_int) -> Result<(), Error> {
    if code == 0 { Ok(()) } else { Err(Error::Provider { call, code }) }
}

/// True if posted, false if the queue is full.
fn check_post(call: &'static str, code: c_int) -> Result<bool, Error> {
    if code == AGAIN { Ok(false) } else { check(call, code).map(|()| true) }
}

fn text(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::Address(text.to_string()))
}

/// A domain of a provider, with the queue of its events.
pub(super) struct Domain(NonNull<RawDomain>);

// SAFETY: it was opened with FI_THREAD_SAFE, so every call on it and on what is made in it may come from any thread.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

impl Domain {
    pub fn open(provider: &str, ip: &str, sends: u64, receives: u64) -> Result<Self, Error> {
        let (name, source) = (text(provider)?, text(ip)?);
        let mut raw = std::ptr::null_mut();
        // SAFETY: both texts end with a zero byte; `raw` is ours.
        let code = unsafe { hf_domain_open(name.as_ptr(), source.as_ptr(), sends, receives, &raw mut raw) };
        match code {
            0 => {}
            libc::ENOSYS => {
                return Err(Error::NoProvider("libfabric.so.1 is missing (Debian: libfabric1)".to_string()));
            }
            libc::ENODATA => {
                return Err(Error::NoProvider(format!("libfabric has no provider {provider} at {ip}")));
            }
            code => return Err(Error::Provider { call: "fi_domain", code }),
        }
        Ok(Self(NonNull::new(raw).expect("a domain that was opened has an address")))
    }

    pub fn facts(&self) -> Facts {
        let mut facts = Facts::default();
        // SAFETY: the domain is open, the structure is ours.
        unsafe { hf_facts(self.0.as_ptr(), &raw mut facts) };
        facts
    }

    /// Readable when an event may have come.
    pub fn descriptor(&self) -> c_int {
        // SAFETY: the domain is open.
        unsafe { hf_eq_descriptor(self.0.as_ptr()) }
    }

    /// True if the descriptor will become readable with the next event.
    pub fn may_sleep(&self) -> bool {
        // SAFETY: the domain is open.
        unsafe { hf_eq_may_sleep(self.0.as_ptr()) != 0 }
    }

    pub fn event(&self) -> Option<RawEvent> {
        let (endpoint, info) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut event = RawEvent { kind: 0, error: 0, endpoint, info, data_bytes: 0, data: [0; 256] };
        // SAFETY: the domain is open, the structure is ours.
        let read = unsafe { hf_eq_read(self.0.as_ptr(), &raw mut event) };
        (read != 0).then_some(event)
    }

    /// Creates a passive endpoint at any free port, which does not listen yet. Returns its port if the provider knows
    /// it.
    pub fn passive(&self, ip: &str) -> Result<(*mut RawListener, u16), Error> {
        let source = text(ip)?;
        let mut listener = std::ptr::null_mut();
        // SAFETY: the domain is open, the text ends with a zero byte, the result is ours.
        let code = unsafe { hf_pep_open(self.0.as_ptr(), source.as_ptr(), 0, &raw mut listener) };
        check("fi_passive_ep", code)?;
        // SAFETY: just made.
        let port = unsafe { Self::port(listener) };
        Ok((listener, port.unwrap_or(0)))
    }

    /// # Safety
    /// The listener is one of this domain, and not closed.
    pub unsafe fn listen(&self, listener: *mut RawListener) -> Result<u16, Error> {
        // SAFETY: by the contract above.
        check("fi_listen", unsafe { hf_pep_listen(self.0.as_ptr(), listener) })?;
        // SAFETY: as above.
        unsafe { Self::port(listener) }
    }

    /// # Safety
    /// As for [`Self::listen`].
    unsafe fn port(listener: *mut RawListener) -> Result<u16, Error> {
        let mut port = 0;
        // SAFETY: by the contract above; the result is ours.
        check("fi_getname", unsafe { hf_pep_port(listener, &raw mut port) })?;
        Ok(port)
    }

    /// # Safety
    /// The listener is one of this domain, not closed, and no event of it is handled at the same time or later.
    pub unsafe fn close_listener(&self, listener: *mut RawListener) {
        // SAFETY: by the contract above.
        unsafe { hf_pep_close(listener) };
    }

    /// # Safety
    /// Both are of this domain; the info came with an event and was not used yet. It is used up.
    pub unsafe fn reject(&self, listener: *mut RawListener, info: *mut RawInfo, said: &[u8]) {
        // SAFETY: by the contract above; `said` is read only.
        unsafe { hf_reject(self.0.as_ptr(), listener, info, said.as_ptr().cast(), said.len() as u64) };
    }

    /// # Safety
    /// The info is of this domain and was not used yet. It is used up.
    pub unsafe fn forget(&self, info: *mut RawInfo) {
        // SAFETY: by the contract above.
        unsafe { hf_info_free(self.0.as_ptr(), info) };
    }

    /// # Safety
    /// The info came with an event of this domain and was not used yet. It is used up.
    pub unsafe fn accepting(&self, info: *mut RawInfo, completions: u64) -> Result<RawEndpoint, Error> {
        let mut out = RawEndpoint::NONE;
        // SAFETY: by the contract above; the result is ours.
        let code = unsafe { hf_endpoint_accepting(self.0.as_ptr(), info, completions, &raw mut out) };
        check("fi_endpoint", code)?;
        Ok(out)
    }

    /// Creates an endpoint that will connect. With a passive endpoint, it takes over that endpoint's address; the
    /// passive one can only be closed afterwards.
    ///
    /// # Safety
    /// The passive endpoint is of this domain, does not listen, and was not used before.
    pub unsafe fn connecting(
        &self,
        from: Option<*mut RawListener>,
        ip: &str,
        port: u16,
        completions: u64,
    ) -> Result<RawEndpoint, Error> {
        let to = text(ip)?;
        let mut out = RawEndpoint::NONE;
        let from = from.unwrap_or(std::ptr::null_mut());
        // SAFETY: the domain is open, the text ends with a zero byte, the result is ours; the rest by the contract.
        let code = unsafe {
            hf_endpoint_connecting(self.0.as_ptr(), from, to.as_ptr(), port, completions, &raw mut out)
        };
        check("fi_endpoint", code)?;
        Ok(out)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: every object created in the domain holds it, so none exists any more.
        unsafe { hf_domain_close(self.0.as_ptr()) };
    }
}

impl RawEndpoint {
    const NONE: Self = Self { posting: std::ptr::null_mut(), completions: std::ptr::null_mut(), has_list: 0 };
}

/// Calls on an endpoint. Each may only be made while the half that it uses is open.
impl RawEndpoint {
    /// # Safety
    /// The posting half is open.
    pub unsafe fn accept(&self) -> Result<(), Error> {
        // SAFETY: by the contract above.
        check("fi_accept", unsafe { hf_accept(self) })
    }

    /// # Safety
    /// The posting half is open.
    pub unsafe fn connect(&self, ip: &str, port: u16, said: &[u8]) -> Result<(), Error> {
        let to = text(ip)?;
        // SAFETY: by the contract above; text and bytes are read only.
        let code = unsafe { hf_connect(self, to.as_ptr(), port, said.as_ptr().cast(), said.len() as u64) };
        check("fi_connect", code)
    }

    /// The descriptors that report events of the queue. Connecting, posting and reading completions may change them.
    ///
    /// # Safety
    /// The completion half is open.
    pub unsafe fn descriptors(&self) -> ([libc::pollfd; DESCRIPTORS], usize) {
        let mut out = [libc::pollfd { fd: -1, events: 0, revents: 0 }; DESCRIPTORS];
        // SAFETY: by the contract above; at most as many are written.
        let count = unsafe { hf_cq_descriptors(self, out.as_mut_ptr(), DESCRIPTORS as u64) };
        (out, usize::try_from(count).expect("a count is not negative"))
    }

    /// # Safety
    /// The completion half is open.
    pub unsafe fn may_sleep(&self, domain: &Domain) -> bool {
        // SAFETY: by the contract above.
        unsafe { hf_cq_may_sleep(domain.0.as_ptr(), self) != 0 }
    }

    /// Reads completions, and returns their number.
    ///
    /// # Safety
    /// The completion half is open.
    pub unsafe fn completions(&self, out: &mut [Completion]) -> usize {
        // SAFETY: by the contract above; at most `out.len()` entries are written.
        let count = unsafe { hf_cq_read(self, out.as_mut_ptr(), out.len() as u64) };
        usize::try_from(count).expect("a count is not negative")
    }

    /// # Safety
    /// The posting half is open; the buffer is left alone until the receive is used up or the endpoint is closed.
    pub unsafe fn receive(&self, to: &Piece, context: u64) -> Result<bool, Error> {
        // SAFETY: by the contract above.
        let code = unsafe { hf_receive(self, to.start.cast(), to.bytes as u64, to.descriptor, context) };
        check_post("fi_recv", code)
    }

    /// # Safety
    /// The posting half is open; unless the bytes are copied, the memory stays mapped until the completion or the
    /// close.
    pub unsafe fn send(&self, from: &Piece, context: u64, copied: bool) -> Result<bool, Error> {
        // SAFETY: by the contract above.
        let code = unsafe {
            hf_send(self, from.start.cast(), from.bytes as u64, from.descriptor, context, copied.into())
        };
        check_post("fi_send", code)
    }

    /// # Safety
    /// As for `send`.
    pub unsafe fn write(
        &self,
        from: &Piece,
        to: (u64, u64),
        context: u64,
        copied: bool,
        immediate: Option<u64>,
    ) -> Result<bool, Error> {
        let (address, key) = to;
        let value = immediate.unwrap_or(0);
        // SAFETY: by the contract above.
        let code = unsafe {
            hf_write(
                self,
                from.start.cast(),
                from.bytes as u64,
                from.descriptor,
                address,
                key,
                context,
                copied.into(),
                immediate.is_some().into(),
                value,
            )
        };
        check_post("fi_write", code)
    }

    /// # Safety
    /// As for `send`; no other user of the memory relies on it until the completion.
    pub unsafe fn read(&self, to: &Piece, from: (u64, u64), context: u64) -> Result<bool, Error> {
        let (address, key) = from;
        // SAFETY: by the contract above.
        let code =
            unsafe { hf_read(self, to.start.cast(), to.bytes as u64, to.descriptor, address, key, context) };
        check_post("fi_read", code)
    }

    /// # Safety
    /// Neither half is used at the same time or later.
    pub unsafe fn close(mut self) {
        // SAFETY: by the contract above.
        unsafe { hf_endpoint_close(&raw mut self) };
    }
}

/// The description of memory in an operation.
pub(super) struct Piece {
    pub start: *mut u8,
    pub bytes: usize,
    pub descriptor: *mut c_void,
}

/// Memory of this process for libfabric: a second mapping of a region, or buffers.
pub(super) struct View {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: an address range that stays until drop and lends no references.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// Maps zeroed memory.
    pub fn buffers(bytes: usize) -> Result<Self, Error> {
        Self::map(bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Maps a region's file once more: writes through one mapping are visible through the other.
    pub fn of(region: &Region, writable: bool) -> Result<Self, Error> {
        let file =
            region.descriptor().ok_or(Error::Memory("a recorded medium has no memory to be written"))?;
        let bytes = usize::try_from(region.bytes()).map_err(|_| Error::Range)?;
        let protection = libc::PROT_READ | if writable { libc::PROT_WRITE } else { 0 };
        Self::map(bytes, protection, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(bytes: usize, protection: c_int, flags: c_int, file: c_int) -> Result<Self, Error> {
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(Error::Memory("it cannot be mapped as is needed"));
        }
        Ok(Self { start: NonNull::new(start.cast()).expect("not mapped at zero unasked"), bytes })
    }

    /// The address of a range.
    pub fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= self.bytes), "a range within the view");
        // SAFETY: within the mapping, or at its end.
        unsafe { self.start.as_ptr().add(offset) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping, and no reference into it exists.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Registered memory. Fields are dropped in order: the registration before the view, the domain last.
pub(super) struct Registered {
    registration: NonNull<RawRegistration>,
    descriptor: *mut c_void,
    pub key: u64,
    view: View,
    _domain: Arc<Domain>,
}

// SAFETY: handles of a domain opened with FI_THREAD_SAFE; the descriptor is only handed back to it.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// Registers a range of a view: for a peer with `rights`, or for this side.
    pub fn new(
        domain: &Arc<Domain>,
        view: View,
        range: std::ops::Range<usize>,
        rights: Option<Rights>,
        wanted_key: u64,
    ) -> Result<Self, Error> {
        let bytes = range.end - range.start;
        let start = view.at(range.start, bytes);
        let (write, read) = rights.map_or((false, false), |r| (r.may_write(), r.may_read()));
        let (mut registration, mut descriptor, mut key) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: the domain is open; the range is mapped, and stays so until the registration is closed in `drop`.
        let code = unsafe {
            hf_register(
                domain.0.as_ptr(),
                start.cast(),
                bytes as u64,
                write.into(),
                read.into(),
                wanted_key,
                &raw mut registration,
                &raw mut descriptor,
                &raw mut key,
            )
        };
        check("fi_mr_reg", code)?;
        let registration = NonNull::new(registration).expect("a registration that was made has an address");
        Ok(Self { registration, descriptor, key, view, _domain: domain.clone() })
    }

    pub fn piece(&self, offset: usize, bytes: usize) -> Piece {
        Piece { start: self.view.at(offset, bytes), bytes, descriptor: self.descriptor }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: made in `new`, closed once. Endpoints that used it are closed or hold it.
        unsafe { hf_unregister(self.registration.as_ptr()) };
    }
}
