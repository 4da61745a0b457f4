// Questions to the server that sent the page.

export class Refused extends Error {
  constructor(message, field) {
    super(message);
    this.field = field || "";
  }
}

async function refusal(answer) {
  try {
    const told = await answer.json();
    return new Refused(told.error, told.field);
  } catch {
    return new Refused(`the server answered ${answer.status}: is mistlab page still running?`);
  }
}

async function sent(question, body, signal) {
  try {
    return await fetch(`/api/${question}`, {
      method: "POST", signal, headers: { "content-type": "application/json" }, body: JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the server does not answer: start it again with mistlab page");
  }
}

export async function ask(question, body, signal) {
  const answer = await sent(question, body, signal);
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

// A question whose answer comes in lines; the last one is returned.
export async function follow(question, body, signal, heard) {
  const answer = await sent(question, body, signal);
  if (!answer.ok) throw await refusal(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused("the server ended in the middle of an answer: ask again");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const event = JSON.parse(line);
      if (event.error) throw new Refused(event.error, event.field);
      if (event.answer) return event.answer;
      heard(event);
    }
  }
}

// Asks one question at a time: a newer one ends the one before.
export class Latest {
  constructor() { this.running = null; }

  stop() {
    if (this.running) this.running.abort();
    this.running = null;
  }

  async run(work) {
    this.stop();
    const own = new AbortController();
    this.running = own;
    try {
      return await work(own.signal);
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    } finally {
      if (this.running === own) this.running = null;
    }
  }
}
