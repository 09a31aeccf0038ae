// Puts a given sequence of token ids through a model with libllama and prints what it took.
//
//     llama_driver MODEL IDS [key=value ...]
//
// IDS is a file of int32. The first `prompt` ids are one prompt, the others are decoded one by one,
// whatever the logits say. Keys: prompt, context, threads, ubatch, mmap, repack (0 or 1), and files
// to write: experts (int32 [decoded tokens, layers, chosen], as they come) and logits (float32
// [decoded tokens, vocabulary]). One JSON object goes to stdout.
//
// Recording experts stops the graph at every router, so times of such a run mean nothing.

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

struct File {
    std::FILE* file = nullptr;

    File(const std::string& path, const char* mode) {
        if (path.empty()) return;
        file = std::fopen(path.c_str(), mode);
        if (!file) throw std::runtime_error(path + " cannot be opened");
    }
    ~File() {
        if (file) std::fclose(file);
    }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    void write(const void* data, std::size_t nbytes) const {
        if (std::fwrite(data, 1, nbytes, file) != nbytes) throw std::runtime_error("a write failed");
    }
};

struct Options {
    std::map<std::string, std::string> given;

    Options(int count, char** words) {
        for (int i = 0; i < count; ++i) {
            const std::string word = words[i];
            const auto at = word.find('=');
            if (at == std::string::npos) throw std::runtime_error(word + " is no key=value");
            given[word.substr(0, at)] = word.substr(at + 1);
        }
    }
    int number(const char* key, int otherwise) const {
        const auto found = given.find(key);
        return found == given.end() ? otherwise : std::stoi(found->second);
    }
    std::string text(const char* key) const {
        const auto found = given.find(key);
        return found == given.end() ? "" : found->second;
    }
};

std::vector<llama_token> read_ids(const char* path) {
    File file(path, "rb");
    std::vector<llama_token> ids;
    llama_token id = 0;
    while (std::fread(&id, sizeof id, 1, file.file) == 1) ids.push_back(id);
    return ids;
}

struct Recorder {
    File file;
    bool on = false;

    static bool callback(ggml_tensor* tensor, bool ask, void* self) {
        auto* recorder = static_cast<Recorder*>(self);
        const bool wanted = std::strncmp(tensor->name, "ffn_moe_topk-", 13) == 0;
        if (ask) return wanted;
        if (wanted && recorder->on) recorder->record(tensor);
        return true;
    }

    void record(const ggml_tensor* chosen) const {
        std::vector<std::int32_t> row(chosen->ne[0]);
        for (std::int64_t token = 0; token < chosen->ne[1]; ++token) {
            const auto nbytes = row.size() * sizeof row[0];
            ggml_backend_tensor_get(chosen, row.data(), token * chosen->nb[1], nbytes);
            file.write(row.data(), nbytes);
        }
    }
};

void quiet(ggml_log_level level, const char* text, void*) {
    if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

llama_model* load(const char* path, const Options& options) {
    llama_model_params params = llama_model_default_params();
    params.load_mode = options.number("mmap", 1) ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
    params.use_extra_bufts = options.number("repack", 1) != 0;
    llama_model* model = llama_model_load_from_file(path, params);
    if (!model) throw std::runtime_error(std::string(path) + " cannot be loaded");
    return model;
}

llama_context* context_of(llama_model* model, const Options& options, int tokens,
                          Recorder& recorder) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = options.number("context", tokens);
    params.n_batch = params.n_ctx;
    params.n_ubatch = options.number("ubatch", 512);
    params.n_outputs_max = 1;  // Else there is room for the logits of a whole batch.
    params.n_threads = params.n_threads_batch = options.number("threads", 2);
    if (recorder.file.file) {
        params.cb_eval = Recorder::callback;
        params.cb_eval_user_data = &recorder;
    }
    llama_context* context = llama_init_from_model(model, params);
    if (!context) throw std::runtime_error("there is no memory for the context");
    return context;
}

void decode(llama_context* context, llama_token* ids, int count) {
    if (llama_decode(context, llama_batch_get_one(ids, count)))
        throw std::runtime_error("llama_decode failed");
    llama_synchronize(context);
}

int run(int argc, char** argv) {
    if (argc < 3) throw std::runtime_error("give a model and a file of ids");
    const Options options(argc - 3, argv + 3);
    auto ids = read_ids(argv[2]);
    const int total = int(ids.size()), prompt = options.number("prompt", 0);
    if (prompt > total) throw std::runtime_error("the prompt is longer than the ids");
    llama_log_set(quiet, nullptr);
    llama_backend_init();
    auto begin = Clock::now();
    llama_model* model = load(argv[1], options);
    Recorder recorder{File(options.text("experts"), "wb")};
    const File logits(options.text("logits"), "wb");
    llama_context* context = context_of(model, options, total, recorder);
    const double load_s = seconds_since(begin);
    const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));

    begin = Clock::now();
    if (prompt) decode(context, ids.data(), prompt);
    const double prompt_s = seconds_since(begin);
    std::printf("{\"load_s\": %.6f, \"prompt_s\": %.6f, \"token_s\": [", load_s, prompt_s);
    recorder.on = true;
    for (int at = prompt; at < total; ++at) {
        begin = Clock::now();
        decode(context, &ids[at], 1);
        const float* row = llama_get_logits_ith(context, -1);
        std::printf("%s%.6f", at > prompt ? ", " : "", seconds_since(begin));
        if (logits.file) logits.write(row, vocabulary * sizeof *row);
    }
    std::printf("]}\n");
    llama_free(context);
    llama_model_free(model);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        return 1;
    }
}
