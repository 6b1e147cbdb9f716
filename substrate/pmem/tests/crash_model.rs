//! The crash models themselves: small histories whose images can be counted by hand.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use pmem::crash::{self, Counts, Failure, Limits, Model, Sample};
use pmem::recorded::Verb;
use pmem::seen::JudgedImages;
use pmem::{Image, Medium, Recorder};
use std::collections::BTreeSet;

/// The contents that a crash at the end of a history may leave in the first bytes of the file; `None`: no file.
fn at_the_end(
    recorder: &Recorder,
    model: Model,
    read: impl Fn(&Image) -> Option<Vec<u8>>,
) -> BTreeSet<Option<Vec<u8>>> {
    let mut last = (0, BTreeSet::new());
    crash::each_image(recorder, model, &Limits::default(), |point, image| {
        if point.event != last.0 {
            last = (point.event, BTreeSet::new());
        }
        last.1.insert(read(&image));
        Ok(())
    })
    .unwrap();
    last.1
}

fn bytes<const N: usize>(at: [u64; N]) -> impl Fn(&Image) -> Option<Vec<u8>> {
    move |image| {
        image.bytes("file")?;
        let mut found = vec![0; N];
        for (found, at) in found.iter_mut().zip(at) {
            image.read("file", at, std::slice::from_mut(found));
        }
        Some(found)
    }
}

fn set<const N: usize, const M: usize>(images: [[u8; M]; N]) -> BTreeSet<Option<Vec<u8>>> {
    images.into_iter().map(|image| Some(image.to_vec())).collect()
}

#[test]
fn stores_to_one_line_arrive_in_order_and_to_two_in_any() {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 256).unwrap();
    file.store(0, &[1]);
    file.store(8, &[2]);
    file.store(64, &[3]);
    let expected = set([[0, 0, 0], [1, 0, 0], [1, 2, 0], [0, 0, 3], [1, 0, 3], [1, 2, 3]]);
    assert_eq!(at_the_end(&recorder, Model::Lines, bytes([0, 8, 64])), expected);
    // One page has all three in order.
    let expected = set([[0, 0, 0], [1, 0, 0], [1, 2, 0], [1, 2, 3]]);
    assert_eq!(at_the_end(&recorder, Model::Pages, bytes([0, 8, 64])), expected);
}

#[test]
fn a_store_of_several_words_can_be_torn_between_them() {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 256).unwrap();
    file.store(4, &[9; 12]);
    assert_eq!(
        at_the_end(&recorder, Model::Lines, bytes([4, 7, 8, 15])),
        set([[0; 4], [9, 9, 0, 0], [9; 4]])
    );
    assert_eq!(at_the_end(&recorder, Model::Pages, bytes([4, 7, 8, 15])), set([[0; 4], [9; 4]]));
}

#[test]
fn only_what_was_persisted_before_the_fence_is_certain() {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 256).unwrap();
    file.write(0, &[1]);
    file.store(64, &[2]);
    file.persist(64..65);
    file.store(64, &[3]);
    file.store(128, &[4]);
    file.fence();
    assert_eq!(
        at_the_end(&recorder, Model::Lines, bytes([0, 64, 128])),
        set([[1, 2, 0], [1, 3, 0], [1, 2, 4], [1, 3, 4]])
    );
    assert_eq!(at_the_end(&recorder, Model::Pages, bytes([0])), set([[0], [1]]), "a fence syncs nothing");
    file.sync().unwrap();
    assert_eq!(
        at_the_end(&recorder, Model::Pages, bytes([0, 64, 128])),
        set([[1, 2, 0], [1, 3, 0], [1, 3, 4]])
    );
}

#[test]
fn a_fence_of_another_thread_or_file_makes_nothing_certain() {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 256).unwrap();
    let other = recorder.medium().create("other", 256).unwrap();
    file.write(0, &[1]);
    other.fence();
    std::thread::scope(|scope| scope.spawn(|| file.fence()).join().unwrap());
    assert_eq!(at_the_end(&recorder, Model::Lines, bytes([0])), set([[0], [1]]));
    file.fence();
    assert_eq!(at_the_end(&recorder, Model::Lines, bytes([0])), set([[1]]));
}

#[test]
fn a_file_is_made_and_removed_as_a_whole() {
    for model in [Model::Lines, Model::Pages] {
        let recorder = Recorder::new();
        let medium = recorder.medium();
        let mut seen = Vec::new();
        medium.create("file", 100).unwrap().write(5, &[1]);
        medium.remove("file").unwrap();
        recorder.returned(7);
        crash::each_image(&recorder, model, &Limits::default(), |point, image| {
            seen.push((point.returned.clone(), bytes([5])(&image)));
            Ok(())
        })
        .unwrap();
        // Made: not yet, or with zeros. Removed: not yet, with the store or without; or gone.
        assert_eq!(seen[..2], [(vec![], None), (vec![], Some(vec![0]))]);
        let removing: BTreeSet<_> = seen[2..6].iter().map(|(_, found)| found.clone()).collect();
        assert_eq!(removing, BTreeSet::from([None, Some(vec![0]), Some(vec![1])]));
        assert!(seen[6..].iter().all(|found| *found == (vec![7], None)) && seen.len() > 6);
    }
}

#[test]
fn a_moment_with_too_many_images_is_capped() {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 4096).unwrap();
    (0..20).for_each(|line| file.store(line * 64, &[1]));
    let mut images = BTreeSet::new();
    let counted = |limits: &Limits, images: &mut BTreeSet<Vec<u8>>| {
        crash::each_image(&recorder, Model::Lines, limits, |_, image| {
            let mut all = vec![0; 20 * 64];
            if image.bytes("file").is_some() {
                image.read("file", 0, &mut all);
            }
            images.insert(all.into_iter().step_by(64).collect());
            Ok(())
        })
        .unwrap()
    };
    let limits = Limits { sampled: 0, ..Limits::default() };
    let counts = counted(&limits, &mut images);
    // The creation is complete with two images; none and all, and from each 20 lines and 190 pairs of them.
    let images_made = 2 + 2 * (1 + 20 + 190);
    assert_eq!(counts, Counts { complete: 1, capped: 1, images: images_made, ..Counts::default() });
    assert_eq!(images.len(), 2 * (1 + 20 + 190));
    assert!(images.iter().all(|image| !(3..=17).contains(&image.iter().filter(|line| **line == 1).count())));
    let sampled = counted(&Limits { near_max: 50, sampled: 500, ..Limits::default() }, &mut images);
    assert!((500..=560).contains(&sampled.images), "{sampled}");
    assert!(images.len() > 850, "samples are their own: {}", images.len());
}

#[test]
fn a_refused_image_is_described() {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 4096).unwrap();
    file.store(64, &[1]);
    recorder.returned(3);
    let refused = crash::each_image(&recorder, Model::Lines, &Limits::default(), |_, image| {
        match bytes([64])(&image) {
            Some(found) if found == [1] => Err(Failure::from("seen".to_owned())),
            _ => Ok(()),
        }
    });
    let violation = refused.unwrap_err();
    assert_eq!(violation.point.returned, [3]);
    assert_eq!(violation.image, "1 units pending: file+64:1/1");
}

/// Ten changes, each said to have returned when its fence had been; the fence of one may be left out.
fn sampled(left_out: Option<u64>, seed: u64) -> Result<Counts, Box<crash::Violation>> {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 1024).unwrap();
    if let Some(call) = left_out {
        recorder.leave_out(Verb::Fence, call);
    }
    for number in 0..10 {
        file.write(number * 64, &[1]);
        file.fence();
        recorder.returned(number);
    }
    let few = Sample { moments: 6, images: 4, recovery_images: 2, seed };
    let recover = |medium: &Medium| match medium.open("file") {
        Ok(file) => {
            file.write(1000, &[1]);
            Ok(Some(file))
        }
        Err(_) => Ok(None),
    };
    crash::sample(&recorder, Model::Lines, &few, recover, |file, _, point| {
        let mut bytes = [0; 1024];
        file.map_or(Ok(()), |file| file.read(0, &mut bytes)).unwrap();
        let lost = point.returned.iter().find(|number| bytes[**number as usize * 64] == 0);
        lost.map_or(Ok(()), |number| Err(format!("{number} is lost")))
    })
}

#[test]
fn a_sample_of_crashes_finds_what_enough_of_them_show() {
    let counts = sampled(None, 1).unwrap();
    assert!(counts.capped <= 6 && counts.images == counts.capped * 4 && counts.recovery_images > 0);
    assert_eq!(sampled(None, 1).unwrap(), counts, "the same for the same seed");
    assert!((0..40).all(|seed| sampled(None, seed).is_ok()));
    assert!((0..40).any(|seed| sampled(Some(5), seed).is_err()));
}

/// Eight lines with pending stores. The first line holds the number of the line that a reader reads next.
fn pointed() -> Recorder {
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 512).unwrap();
    recorder.begin_here();
    file.store(0, &[1]);
    file.store(0, &[2]);
    for line in 1..8 {
        file.store(line * 64 + 6, &[line as u8; 4]);
    }
    recorder.returned(1);
    recorder
}

/// Reads the line that the first byte refers to.
fn follow(file: &pmem::Region) -> (u8, [u8; 2]) {
    let (mut at, mut found) = ([0], [0; 2]);
    file.read(0, &mut at).unwrap();
    file.read(u64::from(at[0]) * 64 + 7, &mut found).unwrap();
    (at[0], found)
}

#[test]
fn of_images_that_are_read_the_same_one_is_judged_and_none_that_is_not() {
    let limits = Limits { complete_max: 1 << 20, ..Limits::default() };
    let (mut every, mut judged) = (BTreeSet::new(), Vec::new());
    let all = crash::each_image(&pointed(), Model::Lines, &limits, |point, image| {
        let medium = Recorder::of_image(image).medium();
        every.insert((point.returned.len(), follow(&medium.open("file").unwrap())));
        Ok(())
    });
    let mut seen = JudgedImages::default();
    let distinct = crash::each_distinct(&pointed(), Model::Lines, &limits, &mut seen, |point, crashed| {
        let file = crashed.medium().open("file").unwrap();
        // Bytes that the check stored itself do not belong to the image.
        file.store(500, &[7]);
        file.read(500, &mut [0]).unwrap();
        judged.push((point.returned.len(), follow(&file)));
        Ok(())
    });
    let (all, distinct) = (all.unwrap(), distinct.unwrap());
    assert_eq!((all.images, all.same), (distinct.images, 0));
    assert_eq!(judged.iter().copied().collect::<BTreeSet<_>>(), every);
    assert_eq!(distinct.images - distinct.same, judged.len() as u64);
    // One check for each distinct result, and the repeated checks that test whether the check depends on the medium
    // alone.
    assert!(judged.len() as u64 <= every.len() as u64 + distinct.images / 1000, "{} judged", judged.len());
}

#[test]
fn what_a_crashed_recovery_reads_counts_as_read() {
    // Recovery reads nothing of the second line, and copies it in a way that only its own crash shows.
    let recorder = Recorder::new();
    let file = recorder.medium().create("file", 256).unwrap();
    recorder.begin_here();
    file.store(64, &[1]);
    let found = crash::crash_recorded(
        &recorder,
        Model::Lines,
        &Limits::default(),
        |medium| {
            let (file, mut begun, mut found) = (medium.open("file").unwrap(), [0], [0]);
            file.read(0, &mut begun).unwrap();
            if begun[0] == 1 {
                file.read(64, &mut found).unwrap();
            }
            file.write(0, &[1]);
            file.fence();
            file.write(0, &[2]);
            file.fence();
            Ok(found[0])
        },
        |found, _, _| if found == 0 { Ok(()) } else { Err("seen".to_owned()) },
    );
    assert_eq!(found.unwrap_err().message, "seen");
}
