//! What a world is made of: chances, wrong clocks, what is broken on purpose, and what is counted.

use ipc::Time;

/// The drift bound of the rules.
pub const DRIFT_PPM: u32 = 50_000;

/// What is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plant {
    /// Nothing.
    None,
    /// A heartbeat counts from its answer instead of its sending.
    BeatFromReply,
    /// An expulsion is not conditional on the heartbeat's version.
    ExpelWithoutVersion,
    /// A manager that starts anew has lost its last changes.
    EpochNotDurable,
    /// Clocks run further off than the rules allow.
    DriftBeyond,
    /// A lease manager that gives its role away goes on until it hears of it.
    GiveWithoutStopping,
    /// A manager that starts anew does not wait: it takes what it finds as seen long ago.
    RestartForgetsToWait,
}

/// What happened in one run, so that a run in which nothing did is seen.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub events: u64,
    pub expulsions: u64,
    pub served_ms: u64,
    pub moves: u64,
    pub restarts: u64,
    pub late: u64,
    pub refused_beats: u64,
}

impl std::ops::AddAssign for Counts {
    fn add_assign(&mut self, more: Self) {
        self.events += more.events;
        self.expulsions += more.expulsions;
        self.served_ms += more.served_ms;
        self.moves += more.moves;
        self.restarts += more.restarts;
        self.late += more.late;
        self.refused_beats += more.refused_beats;
    }
}

/// SplitMix64.
pub struct Chance(pub u64);

impl Chance {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ value >> 31
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.bits() % bound
    }

    pub fn one_in(&mut self, many: u64) -> bool {
        self.below(many) == 0
    }
}

/// A clock that is wrong by so many parts in a million.
pub struct Clock {
    pub real: u64,
    pub shown: u64,
    pub ppm: i64,
}

impl Clock {
    pub fn at(&self, real: u64) -> Time {
        let span = i128::from(real - self.real);
        let shown = span * i128::from(1_000_000 + self.ppm) / 1_000_000;
        Time::from_ns(self.shown + u64::try_from(shown).unwrap())
    }

    pub fn change(&mut self, real: u64, ppm: i64) {
        *self = Self { real, shown: self.at(real).as_ns(), ppm };
    }
}

/// A wrong clock, more often than not at one of the ends of what is allowed.
pub fn drift(chance: &mut Chance, plant: Plant) -> i64 {
    let bound = i64::from(DRIFT_PPM) * if plant == Plant::DriftBeyond { 4 } else { 1 };
    match chance.below(4) {
        0 => bound,
        1 => -bound,
        2 => 0,
        _ => chance.below(2 * bound as u64 + 1) as i64 - bound,
    }
}
