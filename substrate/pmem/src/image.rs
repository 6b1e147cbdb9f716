//! The files of a recorded pool at one time, for example after a crash. Clones share all pages until one of them is
//! written, because a test makes thousands of images.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

/// Bytes of a page: the unit in which files share contents, and in which a file system writes back.
pub(crate) const PAGE_BYTES: usize = 4096;

pub(crate) type Page = [u8; PAGE_BYTES];

/// The files of a pool, by name.
#[derive(Clone, Default)]
pub struct Image {
    files: BTreeMap<Arc<str>, File>,
}

/// Contents of a file. A page in neither map is zero; `changed` takes precedence over `base`.
#[derive(Clone)]
pub(crate) struct File {
    bytes: u64,
    base: Arc<BTreeMap<u64, Arc<Page>>>,
    changed: BTreeMap<u64, Arc<Page>>,
}

impl File {
    /// A page; a page that was never written, or lies beyond the end of the file, is zero.
    pub fn shared_page(&self, index: u64) -> &Arc<Page> {
        static ZEROS: LazyLock<Arc<Page>> = LazyLock::new(|| Arc::new([0; PAGE_BYTES]));
        self.page(index).unwrap_or(&ZEROS)
    }

    fn page(&self, index: u64) -> Option<&Arc<Page>> {
        self.changed.get(&index).or_else(|| self.base.get(&index))
    }

    fn page_mut(&mut self, index: u64) -> &mut Page {
        let base = &self.base;
        let page = self
            .changed
            .entry(index)
            .or_insert_with(|| base.get(&index).cloned().unwrap_or_else(|| Arc::new([0; PAGE_BYTES])));
        Arc::make_mut(page)
    }
}

impl Image {
    /// Names of the files, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &Arc<str>> {
        self.files.keys()
    }

    /// The files in the order of their names.
    pub(crate) fn files(&self) -> Vec<&File> {
        self.files.values().collect()
    }

    /// Length of a file.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.files.get(name).map(|file| file.bytes)
    }

    pub(crate) fn create(&mut self, name: Arc<str>, bytes: u64) {
        self.files.insert(name, File { bytes, base: Arc::default(), changed: BTreeMap::new() });
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.files.remove(name);
    }

    /// Copies bytes out of a file.
    ///
    /// # Panics
    /// If there is no such file, or the range is not within it.
    pub fn read(&self, name: &str, offset: u64, target: &mut [u8]) {
        let file = self.files.get(name).expect("a file that is read is in the image");
        assert!(offset + target.len() as u64 <= file.bytes, "a read within the file");
        each_page(offset, target.len(), |index, within, done| {
            let target = &mut target[done..done + within.len()];
            match file.page(index) {
                Some(page) => target.copy_from_slice(&page[within]),
                None => target.fill(0),
            }
        });
    }

    /// Copies bytes into a file.
    ///
    /// # Panics
    /// If there is no such file, or the range is not within it.
    pub fn write(&mut self, name: &str, offset: u64, source: &[u8]) {
        let file = self.files.get_mut(name).expect("a file that is written is in the image");
        assert!(offset + source.len() as u64 <= file.bytes, "a write within the file");
        each_page(offset, source.len(), |index, within, done| {
            let source = &source[done..done + within.len()];
            file.page_mut(index)[within].copy_from_slice(source);
        });
    }

    /// Moves the changed pages into the shared base, so that later clones are cheap.
    pub(crate) fn fold(&mut self) {
        for file in self.files.values_mut().filter(|file| !file.changed.is_empty()) {
            let changed = std::mem::take(&mut file.changed);
            Arc::make_mut(&mut file.base).extend(changed);
        }
    }
}

/// Calls with each page that a range touches: its index, the range within it, and the number of bytes before it.
fn each_page(offset: u64, bytes: usize, mut each: impl FnMut(u64, std::ops::Range<usize>, usize)) {
    let mut done = 0;
    while done < bytes {
        let at = offset + done as u64;
        let within = usize::try_from(at % PAGE_BYTES as u64).expect("smaller than a page");
        let part = (PAGE_BYTES - within).min(bytes - done);
        each(at / PAGE_BYTES as u64, within..within + part, done);
        done += part;
    }
}
