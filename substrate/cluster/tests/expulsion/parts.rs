//! Parts of a simulated world: probabilities, wrong clocks, planted bugs, and counters.

use ipc::Time;

/// The drift bound of the rules.
pub const DRIFT_PPM: u32 = 50_000;

/// A planted bug.
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
    /// Clocks are more wrong than the rules allow.
    DriftBeyond,
    /// A lease manager that gives its role away keeps serving until it gets the answer.
    GiveWithoutStopping,
    /// A manager that restarts does not wait: it treats the heartbeats that it finds as seen long ago.
    RestartForgetsToWait,
}

/// Counts of the events of one run, so that a run without events is noticed.
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

/// A clock with this error, in parts per million.
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

/// A wrong clock; in most cases its error is at one of the allowed limits.
pub fn drift(chance: &mut Chance, plant: Plant) -> i64 {
    let bound = i64::from(DRIFT_PPM) * if plant == Plant::DriftBeyond { 4 } else { 1 };
    match chance.below(4) {
        0 => bound,
        1 => -bound,
        2 => 0,
        _ => chance.below(2 * bound as u64 + 1) as i64 - bound,
    }
}
