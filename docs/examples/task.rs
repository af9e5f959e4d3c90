use kvsieve::named::{Named, NamedError, Parameter};
use kvsieve::task::{Draw, Question, Rule, Sample, Task, TaskEntry};
use rand::RngExt;

/// A list of shelves with a number of books each; asked for one of them.
struct Shelves {
    most: u64,
}

pub const ENTRY: TaskEntry = TaskEntry {
    name: "shelves",
    about: "how many books stand on a shelf, out of a list of shelves",
    origin: "this guide",
    parameters: &[Parameter { name: "most", default: "99", about: "most books of a shelf" }],
    build,
};

fn build(named: &Named) -> Result<Box<dyn Task>, NamedError> {
    Ok(Box::new(Shelves { most: named.count("most", 99, 1)? as u64 }))
}

impl Task for Shelves {
    fn write(&self, units: usize, draw: &Draw) -> Option<Sample> {
        let mut rng = draw.content();
        let books: Vec<u64> = (0..units).map(|_| rng.random_range(1..=self.most)).collect();
        let line = |(shelf, count): (usize, &u64)| format!(" Shelf {shelf} holds {count} books.");
        let asked = draw.places().random_range(0..units);
        let question = Question {
            text: format!(" How many books are on shelf {asked}?"),
            answer_prefix: format!(" Shelf {asked} holds"),
            expected: format!(" {} books.", books[asked]),
            rule: Rule::FirstNumber(books[asked]),
        };
        let context = books.iter().enumerate().map(line).collect();
        Some(Sample { context, questions: vec![question], depth: Some(asked as f64 / units as f64) })
    }

    fn least_units(&self) -> usize {
        1
    }
}
