//! Records which bytes of its initial image a run has read. Bytes that the run itself stored before it read them do
//! not count. A run whose random numbers and clock do not depend on the medium behaves the same on every image that
//! has the same contents in these bytes.

use crate::LINE_BYTES;
use crate::image::{Image, PAGE_BYTES, Page};
use crate::recorded::FileId;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

const PAGE_LINES: usize = PAGE_BYTES / LINE_BYTES;

/// A set of bytes of a page: one bit for each byte, one word for each cache line.
pub(crate) type Mask = [u64; PAGE_LINES];

/// A page, and the bytes of it that were read.
#[derive(Clone)]
pub(crate) struct ReadPage {
    /// Index of the file in the sorted names of the image.
    pub file: usize,
    pub page: u64,
    pub mask: Arc<Mask>,
}

/// The bytes that a run has read so far.
pub(crate) struct Footprint {
    /// Number of files in the image; files with higher ids were created later and do not count.
    files: u32,
    places: HashMap<(FileId, u64), usize>,
    /// In the order of the first access.
    touched: Vec<TouchedPage>,
}

struct TouchedPage {
    file: FileId,
    page: u64,
    read: Box<Mask>,
    stored: Box<Mask>,
}

impl Footprint {
    pub fn new(files: u32) -> Self {
        Self { files, places: HashMap::new(), touched: Vec::new() }
    }

    pub fn note_read(&mut self, file: FileId, range: Range<u64>) {
        self.each_page(file, range, |touched, within| {
            each_line(within, |line, bits| touched.read[line] |= bits & !touched.stored[line]);
        });
    }

    pub fn note_store(&mut self, file: FileId, range: Range<u64>) {
        self.each_page(file, range, |touched, within| {
            each_line(within, |line, bits| touched.stored[line] |= bits);
        });
    }

    /// Adds the reads of another run. The image `later` of that run is `first` with some stores of this run, so a
    /// byte counts only if both images have the same value there.
    pub fn absorb(&mut self, parts: &[ReadPage], first: &Image, later: &Image) {
        let (first_files, later_files) = (first.files(), later.files());
        let at_first = |name| first.names().position(|first| first == name);
        let places: Vec<Option<usize>> = later.names().map(at_first).collect();
        for part in parts {
            let Some(file) = places[part.file] else { continue };
            let place = self.place(FileId(file as u32), part.page);
            let read = &mut self.touched[place].read;
            if part.mask.iter().zip(read.iter()).all(|(bits, read)| bits & !read == 0) {
                continue;
            }
            let before = first_files[file].shared_page(part.page);
            let after = later_files[part.file].shared_page(part.page);
            for (line, bits) in part.mask.iter().enumerate().filter(|(_, bits)| **bits != 0) {
                read[line] |= bits & equal_bytes(before, after, line);
            }
        }
    }

    /// The pages of which at least one byte was read.
    pub fn parts(&self) -> Vec<ReadPage> {
        let read = self.touched.iter().filter(|touched| touched.read.iter().any(|bits| *bits != 0));
        let part = |touched: &TouchedPage| ReadPage {
            file: touched.file.0 as usize,
            page: touched.page,
            mask: Arc::new(*touched.read),
        };
        read.map(part).collect()
    }

    fn place(&mut self, file: FileId, page: u64) -> usize {
        *self.places.entry((file, page)).or_insert_with(|| {
            let (read, stored) = (Box::new([0; PAGE_LINES]), Box::new([0; PAGE_LINES]));
            self.touched.push(TouchedPage { file, page, read, stored });
            self.touched.len() - 1
        })
    }

    fn each_page(
        &mut self,
        file: FileId,
        range: Range<u64>,
        mut each: impl FnMut(&mut TouchedPage, Range<usize>),
    ) {
        if file.0 >= self.files {
            return;
        }
        let page_bytes = PAGE_BYTES as u64;
        let mut at = range.start;
        while at < range.end {
            let start = at / page_bytes * page_bytes;
            let end = range.end.min(start + page_bytes);
            let place = self.place(file, at / page_bytes);
            each(&mut self.touched[place], (at - start) as usize..(end - start) as usize);
            at = end;
        }
    }
}

/// Calls with each cache line of a range within a page, and with the bits of the range in that line.
fn each_line(within: Range<usize>, mut each: impl FnMut(usize, u64)) {
    let mut at = within.start;
    while at < within.end {
        let (line, from) = (at / LINE_BYTES, at % LINE_BYTES);
        let bytes = (LINE_BYTES - from).min(within.end - at);
        each(line, (u64::MAX >> (LINE_BYTES - bytes)) << from);
        at += bytes;
    }
}

fn equal_bytes(one: &Page, other: &Page, line: usize) -> u64 {
    let bytes = line * LINE_BYTES..(line + 1) * LINE_BYTES;
    if one[bytes.clone()] == other[bytes.clone()] {
        return u64::MAX;
    }
    let pairs = one[bytes.clone()].iter().zip(&other[bytes]);
    pairs.enumerate().fold(0, |bits, (byte, (one, other))| bits | u64::from(one == other) << byte)
}
